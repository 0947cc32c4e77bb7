"""Compiled gfx942 and gfx950 code, executed on a CPU.

    call          a rendered file's host code runs; what it launches is compiled and executed
    machine       a kernel and its launches: workgroups, waves, barriers
    program       the kernel's instructions as functions of waves
    code_object, listing   what the compiler made: the ELF file, and the text held against its bytes
    state         registers of waves, and the loads that they have not waited for
    memory, lds, banks     memory by address; LDS with records of who used it; its bank conflicts
    scalar, vector, dpp, lanes, matrix, vmem, lds_access   the instructions; operands, floats: what they share
    findings      the faults that were met
    dynamic       what 64 KV rows take, counted

docs/amd.md says what is checked, and where hardware may differ.
"""
