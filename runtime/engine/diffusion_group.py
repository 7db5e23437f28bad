"""A diffusion model's answer as one branch of a request: a call a step, and tokens when a block is whole."""

from typing import Any

from llmc.bundle.model.diffusion import Diffusion
from llmc.errors import UsageError
from llmc.runtime.api.request import Request
from llmc.runtime.diffusion.denoiser import Denoiser
from llmc.runtime.engine.branch import SamplerOutput
from llmc.runtime.engine.sample_group import Sample, SampleGroup
from llmc.runtime.engine.scheduler import Scheduler
from llmc.runtime.sampling.logits import Logits
from llmc.runtime.sampling.params import check_diffusion
from llmc.runtime.sampling.samplers import Choice


class Diffused(Sample):
    """A sample whose tokens come by blocks, which a :class:`Denoiser` fills."""

    is_fed = False

    def __init__(self, diffusion: Diffusion, group: SampleGroup, *parts: Any) -> None:
        super().__init__(group, *parts)
        self.speculates = True  # a step asks it for its window
        self.denoiser = Denoiser(diffusion, group.request.params, group.request.prompt)

    @property
    def room(self) -> int:
        return self.denoiser.length

    def propose(self, room: int, rows: int) -> list[int]:
        self.window = self.denoiser.window()
        return []

    def sample(self, logits: Logits) -> SamplerOutput["Sample"]:
        output: SamplerOutput[Sample] = SamplerOutput(self)
        self.cached = self.denoiser.length
        self.request.timeline.calls += 1
        try:
            output.choices += map(Choice, self.denoiser.take(logits))
        except BaseException as error:  # noqa: BLE001  # raised again where the request is known
            output.error = error
        return output


def check_request(request: Request, diffusion: Diffusion | None) -> None:
    """Refuse what only the other kind of model can have. UsageError: names the parameter."""
    check_diffusion(request.params, diffusion is not None)
    if diffusion is not None and (request.thinking is not None or request.logits_processors):
        name = "logits_processors" if request.logits_processors else "reasoning_budget"
        raise UsageError(name, "is given, which a diffusion model cannot have", "leave it out")


class DiffusedGroup(SampleGroup):
    """The one answer of a request."""

    def begin(self, scheduler: Scheduler, branch: Sample, logits: Logits | None) -> bool:
        """Nothing is fed before the first step."""
        return False
