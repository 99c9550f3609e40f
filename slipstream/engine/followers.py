"""Requests of one prompt: the first computes it, the others start from its blocks. No torch here."""

from __future__ import annotations

from slipstream.engine.request import Request


def follow(request: Request, leader: Request | None) -> bool:
    """Tie a new request to the live one whose prompt it has; True when it must wait for that prompt
    first.
    """
    if (
        leader is None
        or leader.group is not None
        or request.group is not None
        or request.sampling.scores_prompt
    ):
        return False
    ours, theirs = request.request, leader.request
    if (ours.prompt, ours.adapter, ours.cache_salt) != (
        theirs.prompt,
        theirs.adapter,
        theirs.cache_salt,
    ):
        return False
    if ours.prompt_table != theirs.prompt_table:
        return False
    request.source = leader
    if _has_prompt(leader):
        return False
    leader.followers.append(request)
    return True


def release_followers(leader: Request, over: bool = False) -> list[Request]:
    """Those that need wait no longer, because the prompt is computed or its request is over."""
    if not over and not _has_prompt(leader):
        return []
    waiting, leader.followers = leader.followers, []
    return [follower for follower in waiting if follower.finish_reason is None]


def source_of(request: Request) -> Request | None:
    """The request whose blocks this one can start from, now. After a preemption it is on its own."""
    source = request.source
    if source is None or source.row < 0 or request.generation >= 0 or not _has_prompt(source):
        return None
    return source


def _has_prompt(leader: Request) -> bool:
    """The last token of a prompt is computed by each request itself: it is where its own first
    token comes from.
    """
    return leader.settled >= leader.prompt_tokens - 1
