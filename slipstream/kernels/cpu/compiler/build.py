"""Compile the text of a module to machine code with LLVM."""

from __future__ import annotations

import llvmlite.binding as llvm

from slipstream.kernels.cpu.compiler.levels import Level


def compile_object(text: str, level: Level) -> bytes:
    """Return the relocatable object of a module."""
    machine = _machine(level)
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = False
    options.slp_vectorization = False
    options.loop_unrolling = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _machine(level: Level) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(f"{level.machine}-unknown-linux-gnu")
    return target.create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small"
    )
