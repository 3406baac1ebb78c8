//! The command line of `bafs plan` and `bafs sim`. Decides nothing.

use std::path::PathBuf;

use clap::{ArgGroup, Args};

use super::{LearnedArgs, PolicyArgs};

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  bafs plan blast.bafs --environment cluster.toml\n  \
bafs plan blast.bafs --catalog head:7000 --identity cluster --home-rate 10MB/s \\\n    \
--local-rate 100MB/s\n  \
bafs plan --environment thesis.toml \\\n    \
--canonical width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1"
)]
pub(crate) struct PlanArgs {
    /// The workflow file.
    #[arg(required_unless_present = "canonical", conflicts_with = "canonical")]
    pub(crate) workflow: Option<PathBuf>,
    /// Equal pipelines instead of a workflow; the keys are width, depth, batch, private, run and
    /// var.
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub(crate) canonical: Option<String>,
    /// Nodes, storage and links to plan for, as TOML; defaults to the free resources of the
    /// catalog's nodes.
    #[arg(long, value_name = "FILE")]
    pub(crate) environment: Option<PathBuf>,
    /// Without --environment: directory that `bafs init` created.
    #[arg(long, env = "BAFS_IDENTITY", value_name = "DIR")]
    pub(crate) identity: Option<PathBuf>,
    /// Without --environment: address of the catalog.
    #[arg(long, env = "BAFS_CATALOG", value_name = "HOST:PORT")]
    pub(crate) catalog: Option<String>,
    /// Rate of the link to home, such as 1MB/s; overrides the environment's.
    #[arg(long, value_name = "RATE")]
    pub(crate) home_rate: Option<String>,
    /// Rate of each node's link, such as 100MB/s; overrides the environment's.
    #[arg(long, value_name = "RATE")]
    pub(crate) local_rate: Option<String>,
    /// Without --environment: take missing rates from an ended run; its journal, or its workflow in
    /// the same directory.
    #[arg(long, value_name = "RUN", conflicts_with = "environment")]
    pub(crate) rates_from: Option<PathBuf>,
    /// Standard deviation of the workflow's run times, as a share of their mean.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = parse_variability,
        conflicts_with = "canonical", allow_negative_numbers = true)]
    pub(crate) variability: f64,
    #[command(flatten)]
    pub(crate) learned: LearnedArgs,
    /// Choose by the analytic model alone, without simulation.
    #[arg(long, alias = "model")]
    pub(crate) model_only: bool,
}

#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("workload").required(true),
    after_help = "Example:\n  bafs sim blast.bafs --environment cluster.toml --all\n  \
bafs sim --environment thesis.toml --strategy Slice --mtbf 12h \\\n    \
--canonical width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1\n  \
bafs sim --from-journal blast.bafs.journal --home-rate 100MB/s --nodes 32 --all\n  \
bafs sim --from-slurm jobs.txt --shared-fraction 0.8 --environment cluster.toml --all"
)]
pub(crate) struct SimArgs {
    /// The workflow file.
    #[arg(group = "workload")]
    pub(crate) workflow: Option<PathBuf>,
    /// Equal pipelines instead of a workflow; the keys are width, depth, batch, private, run and
    /// var.
    #[arg(long, value_name = "KEY=VALUE,...", group = "workload")]
    pub(crate) canonical: Option<String>,
    /// Measured behaviour of each job, which overrides its declaration: CSV with the columns job,
    /// compute, volume, read and written.
    // `requires` alone lets pass what excludes the workflow.
    #[arg(long, value_name = "FILE", requires = "workflow", conflicts_with_all =
        ["canonical", "from_journal", "from_slurm", "from_csv"])]
    pub(crate) trace: Option<PathBuf>,
    /// Ended run to simulate with its measured reads, run times and writes; its journal, or its
    /// workflow in the same directory.
    #[arg(long, value_name = "RUN", group = "workload")]
    pub(crate) from_journal: Option<PathBuf>,
    /// Past jobs of Slurm: the output of `sacct --parsable2`.
    #[arg(long, value_name = "FILE", group = "workload")]
    pub(crate) from_slurm: Option<PathBuf>,
    /// Past jobs of any system: CSV with the columns job, runtime, cpus, after, shared,
    /// shared-bytes, input and output.
    #[arg(long, value_name = "FILE", group = "workload")]
    pub(crate) from_csv: Option<PathBuf>,
    /// Fraction of the input that jobs of one name have in common; Slurm does not record it.
    #[arg(long, alias = "shared", value_name = "SHARE", default_value_t = 0.0,
        value_parser = parse_fraction,
        requires = "from_slurm", conflicts_with_all =
        ["workflow", "canonical", "from_journal", "from_csv"], allow_negative_numbers = true)]
    pub(crate) shared_fraction: f64,
    /// Nodes, storage and links to simulate, as TOML; with --from-journal, defaults to those of the
    /// run.
    #[arg(long, value_name = "FILE")]
    pub(crate) environment: Option<PathBuf>,
    /// Number of nodes; overrides the environment's.
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..),
        allow_negative_numbers = true)]
    pub(crate) nodes: Option<u32>,
    /// Rate of the link to home, such as 1MB/s; overrides the environment's.
    #[arg(long, value_name = "RATE")]
    pub(crate) home_rate: Option<String>,
    /// Rate of each node's link, such as 100MB/s; overrides the environment's.
    #[arg(long, value_name = "RATE")]
    pub(crate) local_rate: Option<String>,
    #[command(flatten)]
    pub(crate) policies: PolicyArgs,
    /// Strategy to simulate: a name, `need` (no strategy), or `adaptive` (the strategy selector
    /// chooses, and changes the strategy during the run). Defaults to the choice of `bafs plan`;
    /// with --from-journal, to `need`.
    #[arg(long, value_name = "NAME", conflicts_with = "all")]
    pub(crate) strategy: Option<String>,
    /// Simulate every feasible strategy, and the scheduler without a strategy.
    #[arg(long)]
    pub(crate) all: bool,
    /// Write charts into this directory: processors and storage over time, a Gantt chart of each
    /// run, and the workflow as DOT. For a linear workload, also simulate and plot the planner's
    /// choice and each strategy's time over a range of sizes, which is slow.
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
    /// Random seed; the same seed gives the same results on every machine.
    #[arg(long, default_value_t = 1, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Mean time between node failures in the whole cluster, such as 12h; overrides the
    /// environment's.
    #[arg(long, alias = "failures", value_name = "MTBF")]
    pub(crate) mtbf: Option<String>,
    /// Standard deviation of the workflow's run times, as a share of their mean.
    #[arg(long, value_name = "SHARE", default_value_t = 0.1, value_parser = parse_variability,
        conflicts_with_all = ["canonical", "trace", "from_journal", "from_slurm", "from_csv"],
        allow_negative_numbers = true)]
    pub(crate) variability: f64,
}

fn parse_fraction(text: &str) -> Result<f64, String> {
    let part = text.parse().ok().filter(|part| (0.0..=1.0).contains(part));
    part.ok_or_else(|| "must be a number from 0 to 1, such as 0.8".to_owned())
}

fn parse_variability(text: &str) -> Result<f64, String> {
    let share = text
        .parse()
        .ok()
        .filter(|share: &f64| (0.0..=10.0).contains(share));
    share.ok_or_else(|| "must be a number from 0 to 10, such as 0.1".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::args::Cli;

    /// What is said of these words behind `bafs`; nothing when they are fine.
    fn parse_error(words: &str) -> Option<String> {
        let words = std::iter::once("bafs").chain(words.split_whitespace());
        Cli::try_parse_from(words).err().map(|e| e.to_string())
    }

    #[test]
    fn ineffective_arguments_are_refused() {
        for (workload, options) in [
            ("w.bafs", "--shared-fraction 0.5"),
            (
                "--canonical c",
                "--shared-fraction 0.5|--trace t|--variability 0.2",
            ),
            (
                "--from-journal j",
                "--shared-fraction 0.5|--trace t|--variability 0.2",
            ),
            ("--from-slurm s", "--trace t|--variability 0.2"),
            (
                "--from-csv c",
                "--shared-fraction 0.5|--trace t|--variability 0.2",
            ),
            ("w.bafs --trace t", "--variability 0.2"),
        ] {
            assert_eq!(parse_error(&format!("sim {workload}")), None);
            for option in options.split('|') {
                let said = parse_error(&format!("sim {workload} {option}"));
                let said =
                    said.unwrap_or_else(|| panic!("{workload} {option}: counts for nothing"));
                assert!(said.contains("cannot be used with"), "{said}");
            }
        }
        assert_eq!(parse_error("sim w.bafs --trace t"), None);
        assert_eq!(
            parse_error("sim --from-slurm s --shared-fraction 0.5"),
            None
        );
    }

    #[test]
    fn negative_numbers_are_refused_with_the_range() {
        for (option, expected) in [
            ("--variability -1", "must be a number from 0 to 10"),
            ("--nodes -1", "invalid value '-1'"),
            ("--seed -1", "invalid value '-1'"),
        ] {
            let said = parse_error(&format!("sim w.bafs {option}")).unwrap_or_default();
            assert!(said.contains(expected), "{said}");
        }
        let said = parse_error("sim --from-slurm s --shared-fraction -1").unwrap_or_default();
        assert!(said.contains("must be a number from 0 to 1"), "{said}");
        let said = parse_error("plan w.bafs --variability -1").unwrap_or_default();
        assert!(said.contains("must be a number from 0 to 10"), "{said}");
    }
}
