"""Whether an engine responds: how long it sent nothing, and what its processes did meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

SILENT_SECONDS = 1.0  # longest silence of an engine that is ready, if no step explains it
_FORGET_SECONDS = 300.0  # time in which half of the longest silence is forgotten
# longest stop of a process by a signal, if the watchdog is as patient
_STOPPED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """What the kernels say about the processes of an engine."""

    stopped: str = ""  # which of them a signal has stopped: "it", or a rank; empty: none
    cpu_seconds: float | None = 0.0  # of all together; None: some run on another machine


class Silence:
    """The time since the last message of an engine.

    Messages come between two steps, and a step on a CPU can take seconds. An engine that sends
    nothing but computes is in such a step, or in a loop that does not end: a quarter of the longest
    silence tells them apart. One without requests has no steps. One that does not compute waits for
    something that does not come, unless a GPU computes for it.
    """

    def __init__(self, longest_seconds: float) -> None:
        """`longest_seconds`: the silence after which the processes are killed."""
        self.seconds = 0.0
        self._longest_seconds = longest_seconds
        self._usual_seconds = 0.0  # the longest silence before; forgotten slowly
        self._unused_seconds = 0.0  # time in which no process of the engine computed
        self._explained = True  # a step may be the reason of the silence
        self._in_step = True  # the processes may compute a step

    @property
    def unusual(self) -> bool:
        if self.seconds <= SILENT_SECONDS:
            return False
        if self._unused_seconds <= SILENT_SECONDS and self._in_step:
            return self.seconds > max(SILENT_SECONDS, self._longest_seconds / 4)
        limit = min(2 * self._usual_seconds, self._longest_seconds / 4)
        return not self._explained or self.seconds > limit

    def count(
        self,
        seconds: float,
        heard: bool,
        computed: bool = False,
        explained: bool = True,
        in_step: bool = True,
    ) -> None:
        """Note that this much time has passed.

        heard: a message came in it
        computed: the processes used a CPU
        explained: without that, a step may still be the reason why no message comes
        in_step: with that, a step may be the reason
        """
        self._usual_seconds *= 0.5 ** (seconds / _FORGET_SECONDS)
        self._explained = explained
        self._in_step = in_step
        self._unused_seconds = 0.0 if computed else self._unused_seconds + seconds
        if heard:
            self._usual_seconds = max(self._usual_seconds, self.seconds)
            self.seconds = 0.0
        else:
            self.seconds += seconds


class Responsiveness:
    """Whether the processes of an engine respond, and when they are to be killed."""

    def __init__(self, longest_seconds: float) -> None:
        """`longest_seconds`: the silence after which they are killed."""
        self._longest_seconds = longest_seconds
        self._silence = Silence(longest_seconds)
        # a message has come since silence was last counted; the reader of messages sets it
        self.heard = False
        self._state = EngineState()
        self._computed = False  # the processes have used a CPU between the last two states
        self._stopped_seconds = 0.0  # time since a signal has stopped one of them

    @property
    def responds(self) -> bool:
        return not self._state.stopped and not self._silence.unusual

    def note_state(self, state: EngineState, seconds: float) -> None:
        """Note the state of the processes this long after the last one."""
        before = self._state.cpu_seconds
        now = state.cpu_seconds
        self._computed = before is not None and now is not None and now > before
        self._state = state
        self._stopped_seconds = self._stopped_seconds + seconds if state.stopped else 0.0

    def count_silence(
        self, seconds: float, busy: bool, on_cpu: bool, all_known: bool = False
    ) -> None:
        """Note that this much time has passed.

        busy: the engine has requests; all_known: without them, it has none of any front end
        """
        # A GPU, or another machine, may compute while no process here does.
        elsewhere = not on_cpu or self._state.cpu_seconds is None
        self._silence.count(
            seconds,
            self.heard,
            self._computed,
            explained=busy and elsewhere,
            in_step=busy or not all_known,
        )
        self.heard = False

    def find_hang(self) -> str:
        """Return why the processes are to be killed now, or an empty text."""
        most = self._longest_seconds
        stopped = self._state.stopped
        if self._silence.seconds >= most:
            why = f": {stopped} has been stopped by a signal" if stopped else ""
            return f"it sent no message for {most:g} s{why}"
        most = min(most, _STOPPED_SECONDS)
        if self._stopped_seconds >= most:
            return f"{stopped} has been stopped by a signal for {most:g} s"
        return ""
