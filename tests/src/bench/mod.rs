//! Benchmarks: their common parts, and their list. Each has a folder of its own.
//!
//! To add one: a module here, and a line in [`ALL`]. It gets [`Options`], interleaves its variants
//! with [`measure::run_interleaved`], and reports all to a [`BenchmarkReport`]: every figure is a
//! ratio to another variant of the same rounds, and missing measurements are listed.
#![allow(clippy::print_stdout, reason = "a benchmark prints what it measured")]

mod again;
mod cache;
mod chaos;
mod core;
mod datapath;
mod experiments;
mod faults;
pub mod machine;
pub mod measure;
mod minimal_file_systems;
pub mod nohang;
pub mod options;
pub mod page;
mod planner;
mod policies;
mod profile;
pub mod report;
mod root;
mod service;
mod shell;
mod sim;
mod slurm;
mod snakemake;

use anyhow::{Context, Result};

use self::minimal_file_systems::{forwarding, immutable, passthrough};
pub use self::options::Options;
pub use self::report::BenchmarkReport;

/// A benchmark.
#[derive(Debug, Clone, Copy)]
pub struct Benchmark {
    /// As `cargo xtask bench NAME` calls it; without spaces.
    pub name: &'static str,
    /// Its comparison, in a line.
    pub description: &'static str,
    /// Runs it.
    pub run: fn(&Options, &mut BenchmarkReport) -> Result<()>,
}

/// Every benchmark.
pub const ALL: &[Benchmark] = &[
    Benchmark {
        name: "again",
        description: "a BWA pipeline run again after failures and changes, beside Snakemake",
        run: again::run,
    },
    Benchmark {
        name: "cache",
        description: "the cooperative cache: home traffic, warm and cold reads, replacement, churn",
        run: cache::run,
    },
    Benchmark {
        name: "chaos",
        description: "runs while nodes, links, disks, catalog and scheduler fail: all end well, \
                      or not",
        run: chaos::run,
    },
    Benchmark {
        name: "core",
        description: "the scheduler core with its journal synced, and the start from the journal",
        run: core::run,
    },
    Benchmark {
        name: "datapath",
        description: "what a program gets of a volume, beside the wire and other file systems",
        run: datapath::run,
    },
    Benchmark {
        name: "experiments",
        description: "the scheduler on real processes: scoping, orders, copies, twins of \
                      applications",
        run: experiments::run,
    },
    Benchmark {
        name: "faults",
        description: "faults that users met, chaos from outside, memory of agents: mended, or not",
        run: faults::run,
    },
    Benchmark {
        name: "nohang",
        description: "programs while servers, links, disks and agents fail: nothing hangs or \
                      is left",
        run: nohang::run,
    },
    Benchmark {
        name: "planner",
        description: "predictions beside the simulator: baselines, regret over two grids, other \
                      graphs",
        run: planner::run,
    },
    Benchmark {
        name: "policies",
        description: "each policy of the scheduler beside the default of its family, simulated",
        run: policies::run,
    },
    Benchmark {
        name: "root",
        description: "an environment as the root of 32 jobs behind a slow link, beside a copy",
        run: root::run,
    },
    Benchmark {
        name: "profile",
        description: "roles and figures of `bafs profile` beside lists by hand and the thesis",
        run: profile::run,
    },
    Benchmark {
        name: "service",
        description: "a queue of 10,000 workflows of 100 users while the service is killed",
        run: service::run,
    },
    Benchmark {
        name: "sim",
        description: "the scheduler core at size: a million jobs on ten thousand simulated nodes",
        run: sim::run,
    },
    Benchmark {
        name: "slurm",
        description: "BLAST on pilots of a real Slurm while pilots and a node are killed",
        run: slurm::run,
    },
    Benchmark {
        name: "snakemake",
        description: "three workflows by Snakemake on a cluster, beside Snakemake alone",
        run: snakemake::run,
    },
    Benchmark {
        name: "grid-engine",
        description: "BLAST on pilots of a real Grid Engine while pilots are cancelled",
        run: slurm::run_on_grid_engine,
    },
];

/// Runs the benchmark of the command line.
///
/// # Errors
/// A wrong command line, or the error of a benchmark.
pub fn main(arguments: &[String]) -> Result<()> {
    match arguments {
        [list] if list == "--list" => {
            for benchmark in ALL {
                println!("{}", benchmark.name);
            }
            Ok(())
        }
        [part, rest @ ..] if part == cache::SOURCE_PROCESS => cache::run_source_process(rest),
        [part, rest @ ..] if part == experiments::JOB_PROCESS => experiments::run_job_process(rest),
        [part, rest @ ..] if part == datapath::WORK_PROCESS => datapath::run_work_process(rest),
        [part, rest @ ..] if part == datapath::WIRE_PROCESS => datapath::run_wire_process(rest),
        [part, rest @ ..] if part == faults::HOLD_PROCESS => faults::run_hold_process(rest),
        [part, rest @ ..] if part == profile::TWIN_PROCESS => profile::run_twin_process(rest),
        [part, rest @ ..] if part == forwarding::FORWARDING_PROCESS => {
            forwarding::run_forwarding_process(rest)
        }
        [part, rest @ ..] if part == immutable::IMMUTABLE_PROCESS => {
            immutable::run_immutable_process(rest)
        }
        [part, rest @ ..] if part == passthrough::PASSTHROUGH_PROCESS => {
            passthrough::run_passthrough_process(rest)
        }
        [part, rest @ ..] if part == core::PART_PROCESS => core::run_part_process(rest),
        [part, rest @ ..] if part == datapath::DELAY_PROCESS => datapath::run_delay_process(rest),
        [name, rest @ ..] => {
            if let Some(ended) = nohang::run_tool(name, rest) {
                return ended;
            }
            let benchmark = ALL.iter().find(|benchmark| benchmark.name == name);
            let benchmark = benchmark.with_context(|| format!("no benchmark '{name}'"))?;
            let options = Options::parse(rest)?;
            let mut report = BenchmarkReport::new(benchmark.name, benchmark.description);
            report.print_line(&machine::describe_machine());
            let ended = (benchmark.run)(&options, &mut report);
            report.finish(options.json);
            ended
        }
        [] => anyhow::bail!("which benchmark? `--list` names them"),
    }
}
