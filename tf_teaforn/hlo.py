"""Arithmetic of a compiled program, counted in the text of its HLO module.

XLA's own `cost_analysis` counts the body of a loop once, whatever the number of turns.
"""

import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_NAME = re.compile(r"[\w.\-]+")
_MARKED_NAME = re.compile(r"%([\w.\-]+)")
_PAIR = re.compile(r"s\d+\[2\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(?:to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{(.*?)\}")
# Instructions that hand a number on.
_SAME_VALUE = ("copy", "convert", "reshape", "bitcast", "broadcast", "opt-barrier")


class _Instruction(NamedTuple):
    shape: str
    opcode: str
    operands: tuple
    attributes: str

    @property
    def dimensions(self):
        return tuple(int(size) for size in _SHAPE.match(self.shape)[1].split(",") if size)

    def attribute(self, name):
        return re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)[1]

    def dimension_list(self, name):
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        return [int(place) for place in found[1].split(",") if place] if found else []


class _Computation:
    def __init__(self):
        self.instructions = {}
        self.root = None


def matmul_flops(text):
    """Floating-point operations of all matrix products, a multiplication and an addition each.

    Args:
        text: an HLO module as text, before or after XLA's passes. Each loop must count from one
            constant to another.

    Raises:
        ValueError: a loop whose number of turns is not in the text, or a convolution.
    """
    module = _parse(text)
    counted = {}

    def flops(name):
        if name not in counted:
            computation = module[name]
            counted[name] = sum(
                instruction_flops(computation, instruction)
                for instruction in computation.instructions.values()
            )
        return counted[name]

    def instruction_flops(computation, instruction):
        if instruction.opcode == "dot":
            left = computation.instructions[instruction.operands[0]].dimensions
            summed = (left[i] for i in instruction.dimension_list("lhs_contracting_dims"))
            return 2 * math.prod(instruction.dimensions) * math.prod(summed)
        if instruction.opcode == "convolution":
            raise ValueError("Convolutions are not counted: take the module before XLA's passes.")
        if instruction.opcode == "while":
            turns = _turns(module, computation, instruction)
            condition, body = (flops(instruction.attribute(part)) for part in ("condition", "body"))
            return turns * (condition + body)
        branches = _BRANCHES.search(instruction.attributes)
        if branches:
            return max(flops(branch.strip().lstrip("%")) for branch in branches[1].split(","))
        return sum(flops(called) for called in _CALLED.findall(instruction.attributes))

    (entry,) = (name for name, computation in module.items() if computation.is_entry)
    return flops(entry)


def seeds(text):
    """{name of an instruction that draws random bits: that of the seed its state is made of}.

    Args:
        text: an HLO module as text. Seeds are pairs of signed integers.

    Raises:
        ValueError: a state that is not made of one seed.
    """
    found = {}
    for computation in _parse(text).values():
        for name, instruction in computation.instructions.items():
            if instruction.opcode == "rng-bit-generator":
                found[name] = _seed(computation, instruction.operands[0])
    return found


def _seed(computation, state):
    waiting, seen, pairs = [state], set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in computation.instructions:
            continue
        seen.add(name)
        instruction = computation.instructions[name]
        if _PAIR.match(instruction.shape):
            pairs.add(name)
        else:
            waiting.extend(instruction.operands)
    if len(pairs) != 1:
        raise ValueError(f"The state {state} of a random generator is made of {len(pairs)} seeds.")
    return pairs.pop()


def _parse(text):
    """{name: `_Computation`} of a module."""
    module, computation = {}, None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            computation = module[head[2]] = _Computation()
            computation.is_entry = bool(head[1])
            continue
        found = _INSTRUCTION.match(line) if computation else None
        if found:
            root, name, rest = found.groups()
            computation.instructions[name] = _instruction(rest)
            if root:
                computation.root = name
    return module


def _instruction(text):
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opcode = _OPCODE.match(text, end)
    close = _closing(text, opcode.end() - 1)
    inside = text[opcode.end() : close]
    if opcode[1] in ("constant", "parameter"):
        operands = (inside,)
    elif "%" in inside:
        # Each operand has its shape in front of its name.
        operands = tuple(_MARKED_NAME.findall(inside))
    else:
        operands = tuple(_NAME.findall(_COMMENT.sub("", inside)))
    return _Instruction(text[:end], opcode[1], operands, text[close + 1 :])


def _closing(text, start):
    """Place of the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place
    raise ValueError(f"Not an HLO instruction: {text}")


def _turns(module, computation, loop):
    """Number of turns of a `while`: of the first of its conditions "counter < bound" to fail."""
    annotated = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if annotated:
        return int(annotated[1])
    condition = module[loop.attribute("condition")]
    turns = [
        _turns_of_bound(module, computation, loop, *bound)
        for bound in _bounds(module, condition, condition.root)
    ]
    known = [count for count in turns if count is not None]
    if not known:
        raise ValueError("A loop's number of turns is not in the program's text.")
    return min(known)


def _source(module, computation, name):
    """(computation, instruction) that a value comes from, past all that only hands it on.

    A function that is called takes a loop's state as a whole, as TensorFlow's wrappers do: a place
    in its parameter is that place in the state.
    """
    while True:
        instruction = computation.instructions[name]
        if instruction.opcode in _SAME_VALUE:
            name = instruction.operands[0]
        elif instruction.opcode == "call" and len(instruction.operands) == 1:
            computation = module[instruction.attribute("to_apply")]
            name = computation.root
        elif instruction.opcode == "get-tuple-element":
            inside, whole = _source(module, computation, instruction.operands[0])
            if whole.opcode != "tuple":
                return computation, instruction
            computation, name = inside, whole.operands[int(instruction.attribute("index"))]
        else:
            return computation, instruction


def _scalar(module, computation, name):
    """What a number is: ("constant", value), ("element", place in the parameter) or None."""
    computation, instruction = _source(module, computation, name)
    if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.operands[0]):
        return "constant", int(instruction.operands[0])
    if instruction.opcode == "get-tuple-element":
        inside, whole = _source(module, computation, instruction.operands[0])
        if whole.opcode == "parameter":
            return "element", int(instruction.attribute("index"))
        if whole.opcode == "while":
            return _after_loop(module, inside, whole, int(instruction.attribute("index")))
    return None


def _after_loop(module, computation, loop, place):
    """What a number in the state of a `while` is after its last turn, as `_scalar` has it."""
    first, step = _carried(module, computation, loop, place)
    if step == 0:
        return first
    if step is None or first is None or first[0] != "constant":
        return None
    return "constant", first[1] + step * _turns(module, computation, loop)


def _carried(module, computation, loop, place):
    """What a number in the state of a `while` is before it, and what each turn adds to it.

    The first as `_scalar` has it; None for what is not known.
    """
    inside, start = _source(module, computation, loop.operands[0])
    body = module[loop.attribute("body")]
    result = body.instructions[body.root]
    if start.opcode != "tuple" or result.opcode != "tuple":
        return None, None
    number, after = ("element", place), result.operands[place]
    unchanged = _scalar(module, body, after) == number
    step = 0 if unchanged else _step(module, body, after, number)
    return _scalar(module, inside, start.operands[place]), step


def _bounds(module, computation, name):
    """Pairs (counter, bound), as `_scalar` has them, of which a condition says counter < bound."""
    computation, instruction = _source(module, computation, name)
    if instruction.opcode == "and":
        return [b for part in instruction.operands for b in _bounds(module, computation, part)]
    if instruction.opcode == "compare" and instruction.attribute("direction") == "LT":
        sides = [_scalar(module, computation, operand) for operand in instruction.operands]
        if None not in sides:
            return [sides]
    return []


def _turns_of_bound(module, computation, loop, counter, bound):
    if counter[0] != "element":
        return None
    first, step = _carried(module, computation, loop, counter[1])
    if bound[0] == "element":
        bound, change = _carried(module, computation, loop, bound[1])
        if change != 0:
            return None
    if not step or None in (first, bound) or (first[0], bound[0]) != ("constant", "constant"):
        return None
    return max(math.ceil((bound[1] - first[1]) / step), 0)


def _step(module, body, name, counter):
    """What a loop's body adds to its counter each turn, or None."""
    computation, instruction = _source(module, body, name)
    if instruction.opcode != "add":
        return None
    parts = [_scalar(module, computation, operand) for operand in instruction.operands]
    steps = [part[1] for part in parts if part is not None and part[0] == "constant"]
    return steps[0] if counter in parts and steps and steps[0] > 0 else None
