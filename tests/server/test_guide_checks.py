"""Checks of grammars that take long do not delay other checks."""

import asyncio
import threading
from contextlib import suppress

import pytest

from slipstream.engine.constraints.guided import GuideError
from slipstream.server.text import guides


async def test_a_check_that_takes_too_long_does_not_stop_others(monkeypatch):
    monkeypatch.setattr(guides, "MAX_COMPILE_SECONDS", 0.05)
    release = threading.Event()
    checked = []
    try:
        slow = asyncio.ensure_future(guides.run_with_bound(10, release.wait))
        queued = asyncio.ensure_future(guides.run_with_bound(10, checked.append, "queued"))
        with pytest.raises(GuideError, match="takes over 15 s to check"):
            await slow
        await queued
        await guides.run_with_bound(10, checked.append, "later")
        assert checked == ["queued", "later"]
        for _ in range(4):
            with pytest.raises(GuideError, match="takes over 15 s"):
                await guides.run_with_bound(10, release.wait)
        # all threads are taken: this grammar is not to blame
        with pytest.raises(GuideError, match="send the request again later"):
            await guides.run_with_bound(10, checked.append, "refused")
        await guides.run_with_bound(guides.LONG_GUIDE + 1, checked.append, "long")
    finally:
        release.set()
    async with asyncio.timeout(30):  # the threads end
        while "again" not in checked:
            with suppress(GuideError):
                await guides.run_with_bound(10, checked.append, "again")
            await asyncio.sleep(0.01)
    assert checked == ["queued", "later", "long", "again"]


async def test_the_error_of_a_check_is_raised():
    def fail() -> None:
        raise GuideError("is no grammar")

    with pytest.raises(GuideError, match="is no grammar"):
        await guides.run_with_bound(10, fail)
