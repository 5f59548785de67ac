"""Build the wandb workspace of a project: imbalance first. docs/metrics.md says what each panel tells."""

import argparse
import importlib.util
import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Panel:
    """A line plot over the steps.

    Attributes:
        title: Its heading, as in docs/metrics.md.
        keys: Figures that it draws.
        pattern: Instead of `keys`, a regular expression of figures whose number depends on the run.
    """

    title: str
    keys: tuple[str, ...] = ()
    pattern: str | None = None


SECTIONS = {
    "Imbalance": (
        Panel("Step-time CV", ("imbalance/step_time_cv", "imbalance/slot_time_cv")),
        Panel("Idle share, planned and measured", ("imbalance/idle_share_planned", "imbalance/idle_share")),
        Panel("Busy seconds by rank", pattern="^rank/[0-9]+/busy_s$"),
        Panel("Straggler", ("imbalance/straggler",)),
        Panel("Load CV, planned and measured", ("imbalance/load_cv", "imbalance/measured_cv")),
        Panel("Cost error", ("imbalance/cost_error",)),
    ),
    "Speed and memory": (
        Panel("Tokens/s", ("perf/tokens_per_s",)),
        Panel("MFU", ("perf/mfu",)),
        Panel("Seconds a step", ("perf/step_s",)),
        Panel("Peak memory", ("perf/memory_peak_gib",)),
    ),
    "Buckets and data": (
        Panel("Samples a step", ("batch/num_samples",)),
        Panel("Tokens a step", ("batch/num_tokens",)),
        Panel("Slots a step", ("batch/num_slots",)),
        Panel("Data wait", ("perf/data_wait_share",)),
        Panel("Samples lost, steps skipped", ("data/num_lost", "train/num_skipped")),
    ),
    "Loss": (
        Panel("Training loss", ("train/loss",)),
        Panel("Held-out loss", ("train/loss_heldout", "train/loss_heldout_linear")),
        Panel("Held-out loss by bucket", pattern="^heldout/loss_[0-9]+x[0-9]+x[0-9]+$"),
        Panel("Held-out loss by sigma", pattern="^heldout/loss_sigma_[0-9]$"),
        Panel("Gradient norm", ("train/grad_norm", "train/grad_norm_matrices", "train/grad_norm_spared")),
        Panel("Learning rate", ("train/lr",)),
    ),
}


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The workspace, not yet saved; needs no network.

    Raises:
        ValueError: If wandb-workspaces is not installed.
    """
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ValueError("wandb-workspaces is not installed: pip install wandb-workspaces")
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    sections = []
    for title, panels in SECTIONS.items():
        plots = [
            # Steps are a figure of their own: wandb's count is another one after a resume.
            reports.LinePlot(title=panel.title, x="step", y=list(panel.keys), metric_regex=panel.pattern)
            for panel in panels
        ]
        sections.append(workspaces.Section(name=title, panels=plots, is_open=True))
    settings = workspaces.WorkspaceSettings(x_axis="step")
    return workspaces.Workspace(entity=entity, project=project, name=name, sections=sections, settings=settings)


def main() -> None:
    """Command line of the dashboard."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entity", required=True, help="wandb user or team")
    parser.add_argument("--project", default="adaptiveload", help="as tracking.project (default adaptiveload)")
    parser.add_argument("--name", default="AdaptiveLoad", help="of the workspace (default AdaptiveLoad)")
    options = parser.parse_args()
    try:
        workspace = build_workspace(options.entity, options.project, options.name)
        workspace.save()
    except Exception as error:  # no key, no network, no such project: wandb's words say which
        sys.exit(f"wandb_dashboard: {error}")
    print(f"dashboard: {workspace.url}")


if __name__ == "__main__":
    main()
