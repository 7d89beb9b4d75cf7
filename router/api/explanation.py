"""Where a prompt would go now, and what each worker would cost: the answer of `Fleet.Explain`."""

from __future__ import annotations

from radixfleet.v1 import fleet_pb2, inference_pb2
from router.api.prompts import Prompts
from router.dispatch.chooser import CandidateReport, Chooser


async def explain(
    prompts: Prompts, chooser: Chooser, request: inference_pb2.GenerateRequest
) -> fleet_pb2.ExplainResponse:
    """Books nothing. Raises InvalidRequest, UnknownModel or Unavailable."""
    prepared = await prompts.prepare(request)
    explanation = chooser.explain(prepared)
    return fleet_pb2.ExplainResponse(
        policy=explanation.policy,
        worker_id=explanation.worker.worker_id if explanation.worker else "",
        reason=explanation.reason,
        prompt_tokens=prepared.prompt_tokens,
        prompt_blocks=len(prepared.block_hashes),
        candidates=[_candidate(report, prepared.prompt_tokens) for report in explanation.candidates],
    )


def _candidate(report: CandidateReport, prompt_tokens: int) -> fleet_pb2.Candidate:
    view = report.worker.view
    return fleet_pb2.Candidate(
        worker_id=report.worker.worker_id,
        address=report.worker.address,
        eligible=not report.ineligible_reason,
        ineligible_reason=report.ineligible_reason,
        matched_blocks=report.matched_blocks,
        matched_tokens=report.matched_tokens,
        uncached_tokens=prompt_tokens - report.matched_tokens,
        outstanding_prompt_tokens=view.outstanding_prompt_tokens,
        running_requests=view.running_requests,
        cost=report.cost if report.cost is not None else 0.0,
        approximate=report.worker.approximate,
    )
