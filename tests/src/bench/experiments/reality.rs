//! Each real run beside the simulator: what jobs read, computed and wrote is taken from a run by
//! need, the order and the time of everything is the simulator's. It decides nothing.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use bafs_proto::time::Time;
use bafs_sched::io::journal;
use bafs_sched::logic::{CheckpointPolicy, Order};
use bafs_sched::past::{self, Past};
use bafs_sched::planner::{Environment, NodeClass};
use bafs_sched::sim::{Load, Policy, Run, Scenario, Simulation};

use crate::bench::Report;
use crate::bench::measure::{Samples, digits};

/// Rate of nodes' links in bytes per second, where too little crossed them to measure it.
const LOCAL_BYTES_PER_S: u64 = 500_000_000;

/// What a home that limits its bytes lets through at once after a rest: so many microseconds of it
/// (`BURST_NS` of `bafs-server`).
const HOME_BURST_US: u64 = 200_000;

/// The machines of an experiment.
#[derive(Debug, Clone)]
pub(super) struct Site {
    pub(super) nodes: NodeClass,
    /// Rate of the link to home.
    pub(super) home_bytes_per_s: u64,
}

/// What is simulated: the jobs of one real run, and its machines.
#[derive(Debug)]
pub(super) struct Model {
    past: Past,
    environment: Environment,
}

impl Model {
    /// The jobs that a journal tells of, on these machines.
    pub(super) fn of(journal: &Path, site: &Site) -> Result<Self> {
        let past = past::from_journal(journal::read(journal)?)?;
        let measured = past.site.as_ref().and_then(|site| site.local_bytes_per_s);
        let disks = past.site.iter().flat_map(|site| &site.nodes);
        let disk_bytes_per_s = disks.filter_map(|class| class.disk_bytes_per_s).next();
        let environment = Environment {
            nodes: vec![NodeClass {
                has_hash_skew: true,
                home_burst_us: HOME_BURST_US,
                disk_bytes_per_s,
                ..site.nodes.clone()
            }],
            home_bytes_per_s: site.home_bytes_per_s,
            local_bytes_per_s: measured.unwrap_or(LOCAL_BYTES_PER_S),
            mtbf_s: None,
            restart_s: 1,
        };
        Ok(Self { past, environment })
    }

    /// When something happens in the simulation, in microseconds, that really happened at this
    /// time: simulated time begins with the first thing that a node was asked for.
    pub(super) fn simulated_us(&self, at: Time) -> Result<u64> {
        let began = self.past.began.context("a run has a beginning")?;
        Ok(at.ms_since(began).saturating_mul(1_000))
    }

    /// The same, with the nodes' links as another run of the same jobs tells, if it was held up
    /// more by them: where nodes keep caches whole, nothing but the first read crosses links.
    pub(super) fn with_links_of(mut self, journal: &Path) -> Result<Self> {
        let past = past::from_journal(journal::read(journal)?)?;
        let measured = past.site.and_then(|site| site.local_bytes_per_s);
        let known = self.environment.local_bytes_per_s;
        self.environment.local_bytes_per_s = measured.map_or(known, |rate| rate.min(known));
        Ok(self)
    }

    /// Simulates one run; failures are times in microseconds and positions of nodes.
    pub(super) fn run(
        &self,
        order: Order,
        checkpoint: CheckpointPolicy,
        failures: Vec<(u64, u32)>,
    ) -> Result<Run> {
        let load = Load::Measured(self.past.measured.clone());
        let slack_permille = self
            .past
            .site
            .as_ref()
            .map_or(0, |site| site.slack_permille);
        let scenario = Scenario {
            checkpoint,
            slack_permille,
            failures,
            ..Scenario::new(self.environment.clone(), Policy::Order(order), load, 1)
        };
        let run = Simulation::new(self.past.workflow.clone(), scenario).run();
        let run = run.map_err(|stuck| anyhow!("{stuck}"))?;
        ensure!(run.is_complete(), "simulated: {:?}", run.outcome);
        Ok(run)
    }
}

/// How long a run took as the simulator counts: from the first thing that was asked for to the last
/// file at home, in seconds.
pub(super) fn took_s(journal: &Path) -> Result<f64> {
    let past = past::from_journal(journal::read(journal)?)?;
    past.took_s.ok_or_else(|| anyhow!("the run has no times"))
}

/// How far simulated runs are from real ones.
#[derive(Debug, Default)]
pub(super) struct Errors {
    time: Vec<f64>,
    home: Vec<f64>,
}

impl Errors {
    /// A real run, which took so many seconds and moved so many bytes over the link to home, with
    /// its simulation.
    pub(super) fn note(&mut self, seconds: f64, home_bytes: f64, run: &Run) {
        let time = run.seconds() / seconds;
        let home = run.home_bytes as f64 / home_bytes.max(1.0);
        println!(
            "  simulated {} s, really {} s: {}; home traffic {}",
            digits(run.seconds()),
            digits(seconds),
            digits(time),
            digits(home)
        );
        self.time.push(time);
        self.home.push(home);
    }

    /// Prints simulated over real, and the largest distance from 1 of each kind.
    pub(super) fn tell(self, report: &mut Report, part: &str) {
        for (what, ratios) in [("time", self.time), ("home", self.home)] {
            let worst = ratios
                .iter()
                .map(|ratio| (ratio - 1.0).abs())
                .fold(0.0, f64::max);
            let ratios = Samples::new(ratios);
            report.say(&format!(
                "  simulated over real {what}: {ratios}, largest error {}",
                digits(worst)
            ));
            report.figure(&format!("{part}_simulated_{what}"), ratios.median());
            report.figure(&format!("{part}_simulated_{what}_error_max"), worst);
        }
    }
}
