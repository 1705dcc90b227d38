"""The dimensions of the generated model."""

import msgspec


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The generated model's dimensions."""

    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 256
    vocab: int = 512

    def errors(self) -> list[tuple[str, str]]:
        """Return what is impossible about the shape, each with a hint."""
        result = [
            (f"{name} is {value}", "use a positive number")
            for name, value in msgspec.structs.asdict(self).items()
            if value < 1
        ]
        if result:
            return result
        if self.hidden % (2 * self.heads):
            what = f"hidden {self.hidden} is no even multiple of heads {self.heads}"
            result.append((what, "make hidden / heads an even number"))
        if self.heads % self.kv_heads:
            result.append((f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}", "use a divisor"))
        if self.vocab < 16 or self.vocab % 4:
            result.append((f"vocab {self.vocab} does not suit the task", "use a multiple of 4, at least 16"))
        return result
