"""What a guard says of memory: plain data, for people and machines."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HeldFor(_Model):
    """Bytes that one line, module or operation holds for backward."""

    nbytes: int
    tensors: int = Field(description="storages, each counted once")
    largest: str = Field("", description="dtype and shape of the largest")


class HeldByLine(HeldFor):
    """Bytes that a line of the program holds for backward."""

    file: str | None = Field(description="null where the line was not seen")
    line: int = 0
    function: str = ""
    text: str = Field("", description="the line as it stands in the file")


class HeldByName(HeldFor):
    """Bytes that a module or an operation holds for backward."""

    name: str | None = Field(description="a module's dotted path, or an operation; null where it is not known")


class DeviceMemory(_Model):
    """What PyTorch's allocator has of an accelerator."""

    device: str
    allocated: int
    reserved: int = Field(description="allocated, and kept for later allocations")
    peak: int = Field(description="the most that was allocated so far")


class Saving(_Model):
    """What would be freed by a change."""

    title: str
    nbytes: int
    detail: str = ""


class MemoryReport(_Model):
    """What holds memory at the fullest moment that was seen.

    `kinds` counts every storage once, under the first that holds it: parameters, buffers, gradients, optimizer state, saved (for
    backward), older graphs (of steps that are over). `lines`, `modules` and `operations` share out the last two.
    """

    step: int
    moment: str
    kinds: dict[str, int] = Field(description="bytes")
    gradients: int = Field(0, description="bytes of all gradients, once backward has made them")
    process: int | None = Field(None, description="resident bytes of the process; null where that is not known")
    devices: list[DeviceMemory] = Field(default_factory=list)
    rest: int = Field(0, description="of the process or the devices, what `kinds` does not account for")
    hidden: int = Field(0, description="saved values that a hook of the program's holds, of unknown size")
    lines: list[HeldByLine] = Field(default_factory=list)
    modules: list[HeldByName] = Field(default_factory=list)
    operations: list[HeldByName] = Field(default_factory=list)
    savings: list[Saving] = Field(default_factory=list)

    @property
    def for_backward(self) -> int:
        """Bytes that graphs alone hold."""
        return self.kinds.get("saved", 0) + self.kinds.get("older graphs", 0)
