"""Models of a repository that are Python code (`model.py`). They must be allowed by a flag.

Start reading at `factory`. Each instance of a model is a process: the server never imports a model,
`worker` does, at the other end of a socket.
"""
