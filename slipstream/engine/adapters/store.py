"""The adapters of one rank: in host memory, and in the pages of its device. Torch is imported with
the first adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.kernels.adapter_layout import PageLayout
from slipstream.kernels.ranks import Ranks

if TYPE_CHECKING:
    from slipstream.kernels.adapters import AdapterPages, HostAdapter


class AdapterStore:
    """State of a rank that follows from what it is sent: the same calls in the same order leave the
    same adapters in the same pages on every rank.
    """

    def __init__(
        self,
        layout: PageLayout,
        total_pages: int,
        most_pages: int,
        dtype: str,
        device: str,
        ranks: Ranks,
    ) -> None:
        """most_pages: the most pages of one adapter; dtype, device: as torch names them"""
        self.pages: AdapterPages | None = None  # None until the first adapter is loaded
        self.device = device
        self._layout = layout
        self._total_pages = total_pages
        self._most_pages = most_pages
        self._dtype = dtype
        self._ranks = ranks
        self._host: dict[int, HostAdapter] = {}

    def add(self, adapter: int, loaded: HostAdapter) -> None:
        self._host[adapter] = loaded

    def remove(self, adapter: int) -> None:
        del self._host[adapter]

    @property
    def numbers(self) -> set[int]:
        """The adapters in host memory."""
        return set(self._host)

    def place(self, placed: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Write adapters to their pages."""
        import torch

        assert self.pages is not None  # they exist since the first adapter was added
        with torch.inference_mode():
            for adapter, pages in placed:
                self.pages.write(pages, self._host[adapter])

    def has_pages(self) -> bool:
        """Allocate the pages if there are none yet; False when a rank has too little memory.

        It happens here and not in a step, so that no plan fails because of it.
        """
        import torch

        from slipstream.kernels.adapters import AdapterPages

        if self.pages is not None:
            return True
        pages: AdapterPages | None = None
        try:
            with torch.inference_mode():
                pages = AdapterPages(
                    self._layout, self._total_pages, self._most_pages, self._dtype, self.device
                )
        except torch.OutOfMemoryError:
            pages = None
        if self._ranks.least(int(pages is not None)):
            self.pages = pages
        return self.pages is not None
