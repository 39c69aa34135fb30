"""CUDA source as TVM writes it → C++ for the emulator: shared arrays, inline PTX and the launch entry."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tvmx.errors import CompileError

_ASM = re.compile(r"\b(?:asm|__asm__)\s+(?:volatile|__volatile__)\s*\(")
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s*)?(\w+)\s+(\w+)\[\];")
_STATIC = re.compile(r"__shared__\s+((?:alignas\(\d+\)|__align__\(\d+\))\s*)?([\w ]+?)\s+(\w+)\[([^\]]+)\];")
_KERNEL = re.compile(r'extern "C" __global__ void(?: __launch_bounds__\([^)]*\))? (\w+)\(([^)]*)\)\s*\{')


@dataclass(frozen=True)
class Asm:
    """One asm statement: template with its string pieces joined, operand expressions in order."""

    template: str
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        return self.outputs + self.inputs


def to_cpp(source: str) -> str:
    """The whole translation unit. Raises CompileError for source that it does not understand."""
    head = source.find("#define uint unsigned int")
    if head < 0:
        raise CompileError("this is not CUDA source as TVM writes it: its prelude is missing")
    start = source.index("#endif", head) + len("#endif")
    body = source[start:]
    entries = [_entry(m[1], m[2]) for m in _KERNEL.finditer(body)]
    body = _DYNAMIC.sub(r"\1* \2 = (\1*)tvmx_emu::tvmx_dynamic_shared();", body)
    body = _static_arrays(body)
    body = _inline_ptx(body)
    return "\n".join([_PRELUDE, body, *entries])


_PRELUDE = """#include "cuda_emulation.h"
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
static inline unsigned __pack_half2(half x, half y) { return (unsigned)y.raw << 16 | x.raw; }
static inline unsigned __pack_nv_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return (unsigned)y.raw << 16 | x.raw; }
struct __align__(8) half4 { half x, y, z, w; half4() = default; half4(half a, half b, half c, half d)
  : x(a), y(b), z(c), w(d) {} };
static inline half4 make_half4(half x, half y, half z, half w) { return half4(x, y, z, w); }
"""


def _entry(name: str, parameters: str) -> str:
    types = [re.sub(r"\s+__restrict__", "", p).rsplit(" ", 1)[0].strip() for p in parameters.split(",") if p.strip()]
    arguments = ", ".join(f"({t})arguments[{i}]" for i, t in enumerate(types))
    head = 'extern "C" __attribute__((no_sanitize("thread"))) void'
    return f"{head} tvmx_entry_{name}(void** arguments) {{ {name}({arguments}); }}"


def _static_arrays(body: str) -> str:
    slot = 0

    def replace(match: re.Match[str]) -> str:
        nonlocal slot
        slot += 1
        _, dtype, name, size = match.groups()
        return f"{dtype}* {name} = ({dtype}*)tvmx_emu::tvmx_static_shared({slot - 1}, sizeof({dtype}) * ({size}));"

    return _STATIC.sub(replace, body)


def _inline_ptx(body: str) -> str:
    out, at = [], 0
    while match := _ASM.search(body, at):
        end = _closing(body, match.end() - 1)
        out.append(body[at : match.start()])
        out.append(translate(parse_asm(body[match.end() : end])))
        at = end + 1
        if body[at : at + 1] == ";":
            at += 1
    out.append(body[at:])
    return "".join(out)


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one at `start`; strings are skipped."""
    depth, at = 0, start
    while at < len(text):
        c = text[at]
        if c == '"':
            at = _string_end(text, at)
        elif c == "(":
            depth += 1
        elif c == ")":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise CompileError("unbalanced parentheses in CUDA source")


def _string_end(text: str, start: int) -> int:
    at = start + 1
    while text[at] != '"':
        at += 2 if text[at] == "\\" else 1
    return at


def parse_asm(text: str) -> Asm:
    """What stands between the parentheses of an asm statement."""
    parts = _split(text, ":")
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', parts[0])).replace("\\n", "\n").replace("\\t", " ")
    operands = [[_operand(o) for o in _split(p, ",") if o.strip()] for p in parts[1:3]]
    operands += [[]] * (2 - len(operands))
    return Asm(template.strip(), tuple(operands[0]), tuple(operands[1]))


def _operand(text: str) -> str:
    match = re.match(r'\s*"[^"]*"\s*\((.*)\)\s*$', text, re.S)
    if match is None:
        raise CompileError(f'asm operand {text!r} is not of the form "constraint"(expression)')
    return match[1]


def _split(text: str, separator: str) -> list[str]:
    parts, depth, last, at = [], 0, 0, 0
    while at < len(text):
        c = text[at]
        if c == '"':
            at = _string_end(text, at)
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[last:at])
            last = at + 1
        at += 1
    return [*parts, text[last:]]


_LDMATRIX = re.compile(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
_MMA = re.compile(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col(?:\.satfinite)?\.(\w+\.\w+\.\w+\.\w+)")
_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global(?:\.L2::\d+B)?\s*\[%(\d)\],\s*\[%(\d)\],\s*%(\d)(?:,\s*%(\d))?;")
_WGMMA = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.(b?f16)\.\1\s*\{([^}]*)\},\s*%(\d+),\s*%(\d+),\s*([01]),"
    r"\s*1,\s*1,\s*0,\s*0;"
)
_WGMMA_WAIT = re.compile(r"wgmma\.wait_group\.sync\.aligned\s+(\d+);")
_WAIT = re.compile(r"cp\.async\.wait_group\s+(\d+);")


def translate(asm: Asm) -> str:
    """C++ that does what the PTX does; a call that faults at run time for PTX that the emulator does not know."""
    text, ops = asm.template, asm.operands
    if m := _LDMATRIX.match(text):
        outs = ", ".join(f"&({o})" for o in asm.outputs)
        trans = int(m[2] is not None)
        call = f"tvmx_emu::tvmx_ldmatrix({asm.inputs[0]}, {m[1]}, {trans}, emu_out)"
        return f"{{ void* emu_out[] = {{{outs}}}; {call}; }}"
    if m := _MMA.match(text):
        groups = [[ops[int(i)] for i in re.findall(r"%(\d+)", g)] for g in re.findall(r"\{([^}]*)\}", text)]
        d, a, b, c = groups
        outs = ", ".join(f"&({o})" for o in d)
        regs = [", ".join(f"tvmx_emu::bits({o})" for o in g) for g in (a, b, c)]
        return (
            f"{{ void* emu_d[] = {{{outs}}}; const uint32_t emu_a[] = {{{regs[0]}}}, emu_b[] = {{{regs[1]}}}, "
            f"emu_c[] = {{{regs[2]}}}; "
            f'tvmx_emu::tvmx_mma("{m[1]}", "{m[2]}", emu_d, emu_a, emu_b, emu_c); }}'
        )
    if m := _COPY.match(text):
        to, source, size = (ops[int(m[i])] for i in (1, 2, 3))
        count = ops[int(m[4])] if m[4] else size
        return f"tvmx_emu::tvmx_cp_async({to}, {source}, {size}, {count});"
    if m := _WGMMA.match(text):
        outs = ", ".join(f"&({ops[int(i)]})" for i in re.findall(r"%(\d+)", m[2]))
        registers = len(re.findall(r"%\d+", m[2]))
        call = f'tvmx_emu::tvmx_wgmma("{m[1]}", emu_d, {registers}, {ops[int(m[3])]}, {ops[int(m[4])]}, {m[5]})'
        return f"{{ void* emu_d[] = {{{outs}}}; {call}; }}"
    if m := _WGMMA_WAIT.match(text):
        return f"tvmx_emu::tvmx_wgmma_wait({m[1]});"
    if text.startswith("wgmma.commit_group"):
        return "tvmx_emu::tvmx_wgmma_commit();"
    if text.startswith("wgmma.fence.sync.aligned;"):
        return ";"  # orders registers, which the emulator always does
    if text.startswith("fence.proxy.async"):
        return "tvmx_emu::tvmx_proxy_fence();"
    if text.startswith("cp.async.commit_group"):
        return "tvmx_emu::tvmx_cp_commit();"
    if m := _WAIT.match(text):
        return f"tvmx_emu::tvmx_cp_wait({m[1]});"
    if text.startswith("cp.async.wait_all"):
        return "tvmx_emu::tvmx_cp_commit(); tvmx_emu::tvmx_cp_wait(0);"
    return f'tvmx_emu::tvmx_unsupported("{text.splitlines()[0] if text else ""}");'
