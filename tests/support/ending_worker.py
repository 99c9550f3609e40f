"""A compile worker that compiles its first job only and then ends, as one that is killed."""

import json
import sys

print(json.dumps("ready"), flush=True)
sys.stdin.readline()
print(json.dumps([0, 0.1, ""]), flush=True)
