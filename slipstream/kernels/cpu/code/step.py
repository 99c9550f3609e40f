"""Code of a step: the loop over a program's operations, the barrier, the threads' waiting."""

from __future__ import annotations

from slipstream.kernels.cpu.code import (
    attention,
    candidates,
    experts,
    heads,
    linear,
    prompt_attention,
    refine,
    rope,
    rows,
)
from slipstream.kernels.cpu.compiler.function import Function, Module
from slipstream.kernels.cpu.compiler.instruction_levels import Level
from slipstream.kernels.cpu.compiler.values import I64, Value
from slipstream.kernels.cpu.operations import (
    KINDS,
    RECORD_FIELDS,
    Attention,
    Candidates,
    Combine,
    Copy,
    Embed,
    ExpertLinear,
    Gather,
    Group,
    Heads,
    Likeliest,
    Linear,
    Merge,
    Norm,
    Refine,
    Rope,
    Route,
    Softcap,
)
from slipstream.kernels.cpu.records import Context, Header, Team, Thread

_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT = 128  # of one process
_FUTEX_WAKE = 129


def write_module(level: Level) -> str:
    """Return the text of the module that has everything. It exports `serve` and `launch`.

    serve(team, thread): compute steps until the team is stopped
    launch(team, thread): start a step, compute a share of it, return when it is done
    """
    module = Module(level)
    write = rows.write_row(module)
    singles = attention.singles(module)
    tiles = prompt_attention.tiles(module, singles.find)
    products = linear.tiles(module)
    code = {
        Embed: rows.embed(module),
        Norm: rows.norm(module, write),
        Copy: rows.copy(module, write),
        Linear: linear.linear(module, products),
        Heads: heads.heads(module),
        Rope: rope.rope(module, write),
        Attention: prompt_attention.attention(module, singles.attend, tiles),
        Merge: rows.merge(module, write, singles),
        Softcap: rows.softcap(module),
        Likeliest: rows.likeliest(module),
        Refine: refine.refine(module),
        Candidates: candidates.candidates(module),
        Route: experts.route(module),
        Group: experts.group(module),
        Gather: experts.gather(module, write),
        ExpertLinear: experts.expert_linear(module, products),
        Combine: experts.combine(module),
    }
    wait = _barrier(module)
    run = _run(module, [(number, code[kind]) for number, kind in enumerate(KINDS)], wait)
    _serve(module, wait, run)
    _launch(module, wait, run)
    return module.text()


def _barrier(module: Module) -> Function:
    """Return the function (thread): all threads arrive before one leaves.

    Waiting threads spin for a while and then sleep, so that they do not hold a core which another
    program needs.
    """
    f = module.function("barrier", 1)
    (thread,) = f.parameters
    team = f.field(thread, Thread.TEAM)
    threads = f.field(thread, Thread.THREADS)
    phase = team + int(Team.PHASE)
    with f.when(threads > 1):
        before = f.load_shared(phase)
        arrived = f.atomic_add(team + int(Team.ARRIVED), 1)
        with f.when(arrived.equals(threads - 1)) as branch:
            f.store_shared(0, team + int(Team.ARRIVED))
            f.store_shared(before + 1, phase)
            with f.when(f.load_shared(team + int(Team.SLEEPERS)) > 0):
                f.system_call(_FUTEX[f.level.machine], phase, _FUTEX_WAKE, threads, 0, 0, 0)
        with branch.otherwise():
            _wait(f, team, phase, before)
    return f


def _wait(f: Function, team: Value, phase: Value, before: Value) -> None:
    limit = f.load(I64, team + int(Team.SPINS), 8)
    spins = f.variable(I64, 0)
    with f.loop() as loop:
        loop.leave_if(f.load_shared(phase).differs(before))
        _pause(f)
        spins.add(1)
        with f.when(spins.get() > limit):
            f.atomic_add(team + int(Team.SLEEPERS), 1)
            with f.when(f.load_shared(phase).equals(before)):
                # the kernel compares the lower half of the number once more
                low = before & 0xFFFFFFFF
                f.system_call(_FUTEX[f.level.machine], phase, _FUTEX_WAIT, low, 0, 0, 0)
            f.atomic_add(team + int(Team.SLEEPERS), -1)


def _pause(f: Function) -> None:
    if f.level.machine == "x86_64":
        f.intrinsic("void", "llvm.x86.sse2.pause")
    else:
        f.intrinsic("void", "llvm.aarch64.hint", f.value("i32", 1))


def _run(module: Module, code: list[tuple[int, Function]], wait: Function) -> Function:
    """Return the function (thread) that computes a step of the team's context."""
    f = module.function("run", 1)
    (thread,) = f.parameters
    context = f.load_shared(f.field(thread, Thread.TEAM) + int(Team.JOB))
    program = f.field(context, Context.PROGRAM)
    private = f.field(context, Context.PRIVATE)
    with f.range(0, f.field(context, Context.OPERATIONS)) as number:
        record = program + number * (8 * RECORD_FIELDS)
        f.choose(f.field(record, Header.KIND), code, record, context, thread)
        barrier = f.field(record, Header.BARRIER)
        shared = private.equals(0)
        with f.when(barrier.equals(1) | (barrier.equals(2) & shared)):
            f.call(wait, thread)
    f.call(wait, thread)
    return f


def _serve(module: Module, wait: Function, run: Function) -> None:
    f = module.function("serve", 1, exported=True)
    (thread,) = f.parameters
    team = f.field(thread, Thread.TEAM)
    with f.loop() as loop:
        f.call(wait, thread)
        loop.leave_if(f.load_shared(team + int(Team.STOP)).differs(0))
        f.call(run, thread)


def _launch(module: Module, wait: Function, run: Function) -> None:
    f = module.function("launch", 1, exported=True)
    (thread,) = f.parameters
    f.call(wait, thread)
    team = f.field(thread, Thread.TEAM)
    with f.when(f.load_shared(team + int(Team.STOP)).equals(0)):
        f.call(run, thread)
