"""Compile the text of a module to machine code with LLVM."""

from __future__ import annotations

import llvmlite.binding as llvm

from slipstream.kernels.cpu.compiler.instruction_levels import Level


def compile_object(text: str, level: Level) -> bytes:
    """Return the relocatable object of a module."""
    machine = _machine(level)
    module = llvm.parse_assembly(text)
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    module.verify()
    _simplify(module, machine)
    code: bytes = machine.emit_object(module)
    return code


def _simplify(module: llvm.ModuleRef, machine: llvm.TargetMachine) -> None:
    """Turn stack slots into registers, loops into their usual form, and remove what is not needed.

    LLVM's standard pipelines take five times as long and gain nothing: the kernels are unrolled and
    made of vectors as they are written.
    """
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    passes.add_sroa_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.add_loop_rotate_pass()
    passes.add_simplify_cfg_pass()
    passes.add_instruction_combine_pass()
    passes.run(module, builder)


def _machine(level: Level) -> llvm.TargetMachine:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple(f"{level.machine}-unknown-linux-gnu")
    return target.create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small"
    )
