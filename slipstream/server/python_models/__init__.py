"""Models of a repository that are Python code (`model.py`), each instance in a process of its own.
Opt-in.

`factory` is the way in. The server process never imports a model: `worker` does, at the other end
of a socket.
"""
