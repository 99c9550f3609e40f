"""An engine process whose rank 1 changes a token that it holds, after a few plans."""

from __future__ import annotations

from rank_runs import flip_token

from slipstream.engine.ranks import following
from slipstream.engine_worker.process import run

follow = following.follow


def follow_and_flip(follower, orders, answer) -> None:
    flip_token(follower)
    follow(follower, orders, answer)


if __name__ == "__main__":
    following.follow = follow_and_flip
    run()
