"""Which stored tensor belongs to which parameter, whatever wrappers wrote into the names of either."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

LEADING = ("module",)
"""Components that data-parallel wrappers put in front of a name."""

ANYWHERE = (
    "_orig_mod",
    "_forward_module",
    "_fsdp_wrapped_module",
    "_fpw_module",
    "_checkpoint_wrapped_module",
)
"""Components that compilers, trainers and checkpointing wrappers put before the part that they wrap."""

ADAPTED = "base_model.model."
"""What PEFT puts in front of the names of the model that it adapts."""

HOLDERS = ("model", "model.module")
"""Under what trainers hold a model, beside the attribute that all stored names share."""


def bare_name(name: str) -> str:
    """``name`` without what wrappers added."""
    if "_" not in name and not name.startswith("module."):
        return name
    name = name.removeprefix(ADAPTED)
    parts = [part for part in name.split(".") if part not in ANYWHERE]
    first = next((place for place, part in enumerate(parts) if part not in LEADING), 0)
    return ".".join(parts[first:])


class Names:
    """Stored names, to be found by those of a module. ``prefix`` is the base model's, which may stand or not."""

    def __init__(self, stored: Iterable[str], prefix: str) -> None:
        self.prefix = prefix
        self._bare: dict[str, str] = {}
        for name in stored:
            self._bare.setdefault(bare_name(name), name)
        self._longer: dict[str, list[str]] = {}
        for bare, name in self._bare.items():
            self._longer.setdefault(bare.partition(".")[2], []).append(name)
        firsts = {bare.partition(".")[0] for bare in self._bare}
        self._holders = (*HOLDERS, *(firsts if len(firsts) == 1 else ()))

    def find(self, name: str) -> str | None:
        """The stored name of the parameter or buffer ``name``, or None."""
        bare = bare_name(name)
        found = next((self._bare[tried] for tried in self._tried(bare) if tried in self._bare), None)
        return found or (None if self.prefix else self._by_one_component(bare))

    def _tried(self, bare: str) -> Iterator[str]:
        """Spellings in the order of trust: as it is, with or without the base's prefix, inside a holder."""
        spellings = [bare]
        if self.prefix:
            spellings += [bare.removeprefix(f"{self.prefix}."), f"{self.prefix}.{bare}"]
        yield from spellings
        for holder in self._holders:
            yield from (f"{holder}.{spelling}" for spelling in spellings)

    def _by_one_component(self, bare: str) -> str | None:
        """The only stored name that has one leading component more or less."""
        _, dot, shorter = bare.partition(".")
        if dot and "." in shorter and shorter in self._bare:
            return self._bare[shorter]
        longer = self._longer.get(bare, []) if dot else []
        return longer[0] if len(longer) == 1 else None
