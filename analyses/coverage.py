"""Do the intervals hold what they promise, and the tests their level?

    coverage = P(low <= rho <= high),   false positives = P(p <= .05 | rho = 0)

Clusters of 6 to 26 tokens, two series that follow an autoregression of .6 within a cluster and
share a cluster effect (intraclass correlation .3), correlated rho in both parts, then made skewed
by exp; the true Spearman correlation is 6/pi arcsin(rho/2). Run it as a script for the tables in
`analyses/results`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import signal, stats

from geomstats_lm.statistics.estimates import Manner, estimate_tokens
from geomstats_lm.statistics.multiplicity import adjust_p_values
from geomstats_lm.statistics.permutation import exchange_test, shift_test
from geomstats_lm.statistics.resampling import draw_counts
from geomstats_lm.statistics.results import markdown_table, rounded

CLUSTERS = (10, 20, 40, 200)
SEEDS = (1, 2, 3)
INTERVALS = ("percentile", "basic", "bca", "bootstrap-t", "robust")
RESULTS = Path(__file__).parent / "results"


def true_spearman(rho: float) -> float:
    """Spearman correlation of a bivariate normal with correlation rho."""
    return 6 / np.pi * np.arcsin(rho / 2)


def clustered_pair(
    rng: np.random.Generator,
    n_clusters: int,
    rho: float,
    *,
    autocorrelation: float = 0.6,
    intraclass: float = 0.3,
    sizes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Response and predictor, shape (n, 2), and the cluster of each row."""
    sizes = rng.integers(6, 27, n_clusters) if sizes is None else sizes
    mix = np.linalg.cholesky([[1.0, rho], [rho, 1.0]])
    pieces = []
    for size in sizes:
        noise = rng.normal(size=(size + 20, 2)) @ mix.T * np.sqrt(1 - autocorrelation**2)
        series = signal.lfilter([1.0], [1.0, -autocorrelation], noise, axis=0)[20:]
        effect = rng.normal(size=2) @ mix.T
        pieces.append(np.sqrt(intraclass) * effect + np.sqrt(1 - intraclass) * series)
    return np.exp(np.concatenate(pieces)), np.repeat(np.arange(n_clusters), sizes)


def regression_interval(columns: np.ndarray, cluster: np.ndarray) -> tuple[float, float]:
    """For comparison: slope of standardized ranks with cluster-robust (CR1) standard error."""
    y, x = stats.zscore(stats.rankdata(columns, axis=0), axis=0).T
    slope = float(np.mean(x * y))
    score = np.bincount(cluster, weights=x * (y - slope * x))
    n, n_clusters = len(x), len(score)
    factor = n_clusters / (n_clusters - 1) * (n - 1) / (n - 2)
    error = np.sqrt(factor * np.sum(score**2)) / n
    half = stats.t.ppf(0.975, n_clusters - 1) * error
    return slope - half, slope + half


def intervals_of_one(
    columns: np.ndarray, cluster: np.ndarray, n_boot: int, seed: int, kinds: Sequence[str]
) -> dict[str, Any]:
    """The intervals of one data set, all from the same resamples."""
    counts = draw_counts(cluster[-1] + 1, n_boot, seed=seed)
    found: dict[str, Any] = {}
    for kind in kinds:
        ((row, _),) = estimate_tokens(columns, cluster, counts, Manner("spearman", interval=kind))
        found[kind] = (row["conf_low"], row["conf_high"])
        if kind == "percentile":
            found["p_value"] = row["p_value"]
    found["regression"] = regression_interval(columns, cluster)
    tokens = np.arange(len(columns))
    iid = draw_counts(len(columns), n_boot, seed=seed)
    ((row, _),) = estimate_tokens(columns, tokens, iid, Manner("spearman"))
    found["iid bootstrap"] = (row["conf_low"], row["conf_high"])
    return found


def coverage(
    n_clusters: int, rho: float, *, n_simulations: int, n_boot: int, seeds=SEEDS, kinds=INTERVALS
) -> pd.DataFrame:
    """Share of intervals that hold the true value, with its Monte Carlo error."""
    truth = true_spearman(rho)
    held: dict[str, list[bool]] = {}
    width: dict[str, list[float]] = {}
    rejected: list[bool] = []
    for seed in seeds:
        rng = np.random.default_rng([seed, n_clusters])
        for run in range(n_simulations // len(seeds)):
            columns, cluster = clustered_pair(rng, n_clusters, rho)
            found = intervals_of_one(columns, cluster, n_boot, 1000 * seed + run, kinds)
            rejected.append(found.pop("p_value") <= 0.05)
            for kind, (low, high) in found.items():
                held.setdefault(kind, []).append(low <= truth <= high)
                width.setdefault(kind, []).append(high - low)
    rows = []
    for kind, values in held.items():
        share = float(np.mean(values))
        rows.append(
            {
                "interval": kind,
                "n_clusters": n_clusters,
                "rho": round(truth, 3),
                "coverage": share,
                "mc_error": float(np.sqrt(share * (1 - share) / len(values))),
                "mean_width": float(np.mean(width[kind])),
                "n_simulations": len(values),
                "n_boot": 0 if kind in ("robust", "regression") else n_boot,
            }
        )
    if rho == 0:
        share = float(np.mean(rejected))
        rows.append(
            {**rows[0], "interval": "1 - false positives of p_value", "coverage": 1 - share}
        )
    return pd.DataFrame(rows)


def false_positives(
    n_clusters: int, *, n_simulations: int, n_permutations: int, seeds=SEEDS
) -> pd.DataFrame:
    """Rejections at 5 % where there is nothing to find, for each permutation scheme."""
    p_values: dict[str, list[float]] = {}
    for seed in seeds:
        rng = np.random.default_rng([seed, n_clusters, 7])
        for run in range(n_simulations // len(seeds)):
            columns, cluster = clustered_pair(rng, n_clusters, 0.0)
            y, x = stats.rankdata(columns, axis=0).T
            choice = {"n_permutations": n_permutations, "seed": 1000 * seed + run}
            size = np.bincount(cluster)
            mean_x = (np.bincount(cluster, x) / size)[cluster]
            mean_y = (np.bincount(cluster, y) / size)[cluster]
            tests = {
                "clusters, total": exchange_test(x, y, cluster, **choice)[0],
                "clusters, between": exchange_test(mean_x, mean_y, cluster, **choice)[0],
                "shift, within": shift_test(x, y, cluster, **choice)[0],
                # for contrast alone, so with fewer permutations
                "single tokens (wrong)": exchange_test(
                    x, y, np.arange(len(x)), n_permutations=199, seed=choice["seed"]
                )[0],
            }
            for name, p_value in tests.items():
                p_values.setdefault(name, []).append(p_value)
    rows = []
    for name, values in p_values.items():
        share = float(np.mean(np.array(values) <= 0.05))
        error = float(np.sqrt(share * (1 - share) / len(values)))
        rows.append(
            {
                "test": name,
                "n_clusters": n_clusters,
                "false_positives": share,
                "mc_error": error,
                "n_simulations": len(values),
                "n_permutations": 199 if "wrong" in name else n_permutations,
            }
        )
    return pd.DataFrame(rows)


def false_discoveries(*, n_simulations: int, n_boot: int, n_clusters=40, seed=1) -> pd.DataFrame:
    """False discovery rate of tables of 20 dependent cells, 15 of them without association."""
    rng = np.random.default_rng([seed, 11])
    shares = []
    for run in range(n_simulations):
        counts = draw_counts(n_clusters, n_boot, seed=run)
        columns, cluster = clustered_pair(rng, n_clusters, 0.0)
        p_values = []
        for cell in range(20):
            noise, _ = clustered_pair(rng, n_clusters, 0.0, sizes=np.bincount(cluster))
            # cells share half of their response, as layers do
            y = np.log(columns[:, 0]) + np.log(noise[:, 0])
            x = np.log(noise[:, 1]) + (0.5 * y if cell < 5 else 0.0)
            ((row, _),) = estimate_tokens(
                np.column_stack([y, x]), cluster, counts, Manner("spearman")
            )
            p_values.append(row["p_value"])
        found = adjust_p_values(np.array(p_values)) <= 0.05
        shares.append(found[5:].sum() / max(found.sum(), 1))
    return pd.DataFrame(
        [
            {
                "method": "fdr_bh",
                "nominal": 0.05,
                "false_discovery_rate": float(np.mean(shares)),
                "mc_error": float(np.std(shares) / np.sqrt(len(shares))),
                "n_simulations": n_simulations,
            }
        ]
    )


def keep(table: pd.DataFrame, name: str) -> None:
    """Put rows into a table of the results folder, in the place of rows on the same settings."""
    path = RESULTS / name
    keys = [key for key in ("interval", "test", "method", "n_clusters", "rho") if key in table]
    if path.exists():
        table = pd.concat([pd.read_csv(path), table]).drop_duplicates(keys, keep="last")
    order = [key for key in ("n_clusters", "rho") if key in table]
    table = table.sort_values(order, kind="stable") if order else table
    table.to_csv(path, index=False, float_format="%.5g")


def main(n_simulations: int = 2001, n_boot: int = 599, *clusters: int) -> None:
    """Write coverage.csv, false_positives.csv and false_discoveries.csv, and a page of them."""
    RESULTS.mkdir(exist_ok=True)
    if not clusters:
        discoveries = false_discoveries(n_simulations=n_simulations // 4, n_boot=n_boot)
        keep(discoveries, "false_discoveries.csv")
    for n_clusters in clusters or CLUSTERS:
        keep(
            false_positives(n_clusters, n_simulations=n_simulations, n_permutations=999),
            "false_positives.csv",
        )
        for rho in (0.0, 0.6):
            keep(
                coverage(n_clusters, rho, n_simulations=n_simulations, n_boot=n_boot),
                "coverage.csv",
            )
    write_page()


def write_page() -> None:
    """The tables side by side, coverage with intervals as rows and settings as columns."""
    table = pd.read_csv(RESULTS / "coverage.csv")
    wide = table.pivot(index="interval", columns=["rho", "n_clusters"], values="coverage")
    wide = wide.loc[list(dict.fromkeys(table["interval"]))].round(3).reset_index()
    settings = [f"rho {key[0]:g}, {key[1]} clusters" for key in wide.columns.to_list()[1:]]
    wide.columns = pd.Index(["interval", *settings])
    tests = pd.read_csv(RESULTS / "false_positives.csv")
    found = pd.read_csv(RESULTS / "false_discoveries.csv")
    sections = [
        "# Do the intervals hold what they promise?",
        f"Share of 95 % intervals that hold the true Spearman correlation. "
        f"{len(SEEDS)} seeds, {int(table['n_boot'].max())} resamples each. Simulations per "
        "setting, and the Monte Carlo error of a coverage of .95: "
        + "; ".join(
            f"{n} clusters at least {size} (+-{np.sqrt(0.95 * 0.05 / size):.4f})"
            for n, size in table.groupby("n_clusters")["n_simulations"].min().items()
        )
        + ".",
        markdown_table(rounded(wide)),
        "False positives of permutation tests at a nominal 5 %:",
        markdown_table(rounded(tests)),
        "False discoveries at a nominal 5 %, 20 dependent cells of which 15 are null:",
        markdown_table(rounded(found)),
    ]
    (RESULTS / "coverage.md").write_text("\n\n".join(sections) + "\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
