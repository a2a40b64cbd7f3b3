"""Functions, arguments and results on their way between driver and ranks, by value.

cloudpickle carries functions that exist nowhere but in a notebook cell, a script or a test module. Two things are
added: code keeps the name of its file, so that a rank's traceback can be shown with the cell's own lines; and what
cannot be carried is named.
"""

from __future__ import annotations

import dis
import functools
import io
import pickle
import site
import sys
import sysconfig
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from hybridlab.errors import UserError

_registry = threading.Lock()  # cloudpickle's list of by-value modules belongs to the process


def dump_call(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
    """What all ranks are sent alike. Raises UserError that names what cannot travel."""
    named = {_name(fn): fn}
    named |= {f"argument {index + 1}": value for index, value in enumerate(args)}
    named |= {f"argument {key!r}": value for key, value in kwargs.items()}
    return _dump_named((fn, args, dict(kwargs)), named)


def dump_arguments(values: tuple[Any, ...], rank: int) -> bytes:
    """What one rank is sent of its own. Raises UserError that names what cannot travel."""
    named = {f"argument {index + 1} of rank {rank}": value for index, value in enumerate(values)}
    return _dump_named(tuple(values), named)


def dump_result(value: Any, rank: int) -> bytes:
    """A rank's result. Tensors go by value: detached, on the CPU, without the storage around a slice."""
    try:
        return _dumps(value, result=True)
    except Exception as error:
        path, guilty = _blame("the result", value)
        raise UserError(
            f"rank {rank} returned something that cannot be sent back: {path} is a {_kind(guilty)} ({_brief(error)}).",
            fix="return tensors, numbers and plain containers.",
        ) from None


def loads(data: bytes | bytearray | memoryview) -> Any:
    """The value that was shipped."""
    return pickle.loads(data)


def _dump_named(value: Any, named: Mapping[str, Any]) -> bytes:
    modules = {module for part in named.values() for module in _home_modules(part)}
    with _registry:
        fresh = [module for module in modules if module.__name__ not in cloudpickle.list_registry_pickle_by_value()]
        for module in fresh:
            cloudpickle.register_pickle_by_value(module)
        try:
            return _dumps(value)
        except Exception as error:
            refusal = error if isinstance(error, UserError) else None
            for label, part in named.items():
                if not _travels(part):
                    path, guilty = _blame(label, part)
                    why = refusal.rule if refusal else f"it is a {_kind(guilty)} ({_brief(error)})."
                    raise UserError(
                        f"{path} cannot be sent to the ranks: {why}",
                        fix="make it inside the function that the ranks run.",
                    ) from None
            raise UserError(f"the call cannot be sent to the ranks ({_brief(error)}).") from None
        finally:
            for module in fresh:
                cloudpickle.unregister_pickle_by_value(module)


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, *, result: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._result = result

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.CodeType):
            # cloudpickle 3.1 replaces the file's name by "<dynamic-code>"; with it the source lines would be lost.
            make, arguments = self.dispatch_table[types.CodeType](obj)[:2]
            return _code_from_file, (obj.co_filename, make, arguments)
        if self._result and isinstance(obj, torch.Tensor):
            plain = _by_value(obj)
            if plain is not obj:
                return _same, (plain,)
        return super().reducer_override(obj)


def _dumps(value: Any, *, result: bool = False) -> bytes:
    file = io.BytesIO()
    _Pickler(file, result=result).dump(value)
    return file.getvalue()


def _code_from_file(filename: str, make: Any, arguments: tuple[Any, ...]) -> types.CodeType:
    return make(*arguments).replace(co_filename=filename)


def _same(value: Any) -> Any:
    return value


def _by_value(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return tensor.cpu() if tensor.is_cuda else tensor
    plain = tensor.detach() if tensor.grad_fn is not None else tensor
    if plain.is_cuda:
        plain = plain.detach().cpu().requires_grad_(plain.requires_grad)
    if plain.untyped_storage().nbytes() > plain.numel() * plain.element_size():
        plain = plain.detach().clone().requires_grad_(plain.requires_grad)
    return plain


# --- which modules must travel with their functions ------------------------------------------------------------------


def _home_modules(value: Any, deep: bool = True) -> Iterator[types.ModuleType]:
    """Modules whose functions and classes a rank could not import, or would import a second copy of: test modules,
    files beside a script. An installed package is imported in the rank by its name."""
    while isinstance(value, functools.partial):
        value = value.func
    owner = value if isinstance(value, type | types.FunctionType | types.MethodType) else type(value)
    module = sys.modules.get(getattr(owner, "__module__", None) or "")
    if module is not None and not _installed(module):
        yield module
    if deep and isinstance(value, Mapping):
        value = list(value.values())
    if deep and isinstance(value, list | tuple | set):
        for item in value:
            yield from _home_modules(item, deep=False)


def _installed(module: types.ModuleType) -> bool:
    if module.__name__.partition(".")[0] in {"hybridlab", "__main__", *sys.stdlib_module_names}:
        return True  # __main__: cloudpickle sends what is in it by value anyway
    file = getattr(module, "__file__", None)
    return file is None or any(Path(file).is_relative_to(root) for root in _install_roots())


@functools.cache
def _install_roots() -> tuple[Path, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    return tuple(Path(path) for path in paths if path)


# --- naming what cannot travel ---------------------------------------------------------------------------------------


def _travels(value: Any) -> bool:
    try:
        _dumps(value)
    except Exception:
        return False
    return True


def _blame(path: str, value: Any, depth: int = 5) -> tuple[str, Any]:
    """The innermost part of a value that cannot be pickled, and how to get there in words."""
    if depth:
        for label, part in _parts(value):
            if not _travels(part):
                return _blame(f"{label} of {path}", part, depth - 1)
    return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield f"function {_name(value.func)}", value.func
        yield "arguments", [*value.args, value.keywords]
    elif isinstance(value, types.MethodType):
        yield "object", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            yield f"variable `{name}`", cell.cell_contents
        for name in sorted(_global_names(value.__code__) & value.__globals__.keys()):
            yield f"global `{name}`", value.__globals__[name]
        yield from ((f"default {index + 1}", item) for index, item in enumerate(value.__defaults__ or ()))
    elif isinstance(value, Mapping):
        yield from ((f"item [{key!r}]", item) for key, item in value.items())
    elif isinstance(value, Sequence | set) and not isinstance(value, str | bytes):
        yield from ((f"item [{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type | types.ModuleType):
        yield from ((f"attribute .{name}", item) for name, item in getattr(value, "__dict__", {}).items())


def _global_names(code: types.CodeType) -> set[str]:
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _name(fn: Any) -> str:
    return f"`{getattr(fn, '__qualname__', None) or type(fn).__qualname__}`"


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _brief(error: Exception) -> str:
    first = str(error).strip().splitlines()
    return first[0][:200] if first else type(error).__name__
