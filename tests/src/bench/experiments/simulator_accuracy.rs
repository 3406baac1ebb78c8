//! Each real run against the simulator: reads, computing and writes of jobs come from a run by
//! need, the order and all times from the simulator. Where milliseconds decide it is simulated many
//! times, each time a little otherwise. It decides nothing.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use bafs_proto::time::Time;
use bafs_sched::io::journal;
use bafs_sched::{JobStartOrder, PolicyNames};
use bafs_sim::past_runs::{self, PastRun};
use bafs_sim::planner::{Environment, NodeClass};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, SimulationResult};

use crate::bench::BenchmarkReport;
use crate::bench::measure::{Samples, format_number};

/// Rate of nodes' links in bytes per second, where too little crossed them to measure it.
const LOCAL_BYTES_PER_S: u64 = 500_000_000;

/// The burst of a home with a rate limit after a rest, in microseconds of its rate (`BURST_NS` of
/// `bafs-server`).
const HOME_BURST_US: u64 = 200_000;

/// Simulations of one real run.
const SIMULATIONS: u64 = 21;

/// In each of them a job computes longer or shorter by up to a half of this, in microseconds. In
/// two rounds of one run the same jobs differed by 15 ms, in the middle, as this lets them differ.
const JITTER_US: u64 = 50_000;

/// The machines of an experiment.
#[derive(Debug, Clone)]
pub(super) struct ExperimentSite {
    pub(super) nodes: NodeClass,
    /// Rate of the link to home.
    pub(super) home_bytes_per_s: u64,
}

/// The input of a simulation: the jobs of one real run, and its machines.
#[derive(Debug)]
pub(super) struct SimulationModel {
    past: PastRun,
    environment: Environment,
}

impl SimulationModel {
    /// The jobs of a journal, on these machines.
    pub(super) fn from_journal(journal: &Path, site: &ExperimentSite) -> Result<Self> {
        let past = past_runs::from_journal(journal::read_history(journal)?)?;
        let measured = past.site.as_ref().and_then(|site| site.local_bytes_per_s);
        let disks = past.site.iter().flat_map(|site| &site.nodes);
        let disk_bytes_per_s = disks.filter_map(|class| class.disk_bytes_per_s).next();
        let environment = Environment {
            nodes: vec![NodeClass {
                has_hash_imbalance: true,
                home_burst_us: HOME_BURST_US,
                disk_bytes_per_s,
                ..site.nodes.clone()
            }],
            home_bytes_per_s: site.home_bytes_per_s,
            local_bytes_per_s: measured.unwrap_or(LOCAL_BYTES_PER_S),
            mtbf_s: None,
            restart_s: 0,
        };
        Ok(Self { past, environment })
    }

    /// When something happens in the simulation, in microseconds, that really happened at this
    /// time: simulated time begins with the first thing that a node was asked for.
    pub(super) fn simulated_us(&self, at: Time) -> Result<u64> {
        let began = self.past.began_at.context("a run has a beginning")?;
        Ok(at.ms_since(began).saturating_mul(1_000))
    }

    /// The same, with the rates of nodes' links from another run of the same jobs, if that run
    /// waited more for them: if nodes keep caches whole, only the first read crosses links.
    pub(super) fn with_measured_links(mut self, journal: &Path) -> Result<Self> {
        let past = past_runs::from_journal(journal::read_history(journal)?)?;
        let measured = past.site.and_then(|site| site.local_bytes_per_s);
        let known = self.environment.local_bytes_per_s;
        self.environment.local_bytes_per_s = measured.map_or(known, |rate| rate.min(known));
        Ok(self)
    }

    /// Simulates one run many times: with blocks on other nodes, and jobs a few milliseconds longer
    /// or shorter.
    pub(super) fn simulate_variants(&self, order: JobStartOrder) -> Result<SimulatedResults> {
        let runs = (1..=SIMULATIONS).map(|seed| {
            let mut rng = SeededRng::new(seed);
            let mut measured = self.past.measured.clone();
            for job in &mut measured.jobs {
                let scattered = job.compute_us + rng.next_below(JITTER_US);
                job.compute_us = scattered.saturating_sub(JITTER_US / 2);
            }
            let load = LoadModel::Measured(measured);
            self.simulate(order, "never", (load, Vec::new()), seed)
        });
        Ok(SimulatedResults::from_runs(
            &runs.collect::<Result<Vec<SimulationResult>>>()?,
        ))
    }

    /// Simulates one run; failures are times in microseconds and positions of nodes.
    pub(super) fn simulate_run(
        &self,
        order: JobStartOrder,
        checkpoint: &'static str,
        failures: Vec<(u64, u32)>,
    ) -> Result<SimulationResult> {
        let load = LoadModel::Measured(self.past.measured.clone());
        self.simulate(order, checkpoint, (load, failures), 1)
    }

    fn simulate(
        &self,
        order: JobStartOrder,
        checkpoint: &'static str,
        (load, failures): (LoadModel, Vec<(u64, u32)>),
        seed: u64,
    ) -> Result<SimulationResult> {
        let slack_permille = self
            .past
            .site
            .as_ref()
            .map_or(0, |site| site.slack_permille);
        let scenario = Scenario {
            policies: PolicyNames::default().with("replication", checkpoint),
            slack_permille,
            failures,
            ..Scenario::new(self.environment.clone(), Policy::Order(order), load, seed)
        };
        let run = Simulation::new(self.past.workflow.clone(), scenario).run();
        let run = run.map_err(|stuck| anyhow!("{stuck}"))?;
        ensure!(run.is_complete(), "simulated: {:?}", run.outcome);
        Ok(run)
    }
}

/// How long a run took as the simulator counts: from the first thing that was asked for to the last
/// file at home, in seconds.
pub(super) fn duration_s(journal: &Path) -> Result<f64> {
    let past = past_runs::from_journal(journal::read_history(journal)?)?;
    past.duration_s
        .ok_or_else(|| anyhow!("the run has no times"))
}

/// Results of the simulations of one run.
#[derive(Debug)]
pub(super) struct SimulatedResults {
    pub(super) seconds: Samples,
    pub(super) home_bytes: Samples,
}

impl SimulatedResults {
    /// Of one simulation at least.
    pub(super) fn from_runs(runs: &[SimulationResult]) -> Self {
        let home_bytes = runs.iter().map(|run| run.home_bytes as f64);
        Self {
            seconds: Samples::new(runs.iter().map(SimulationResult::seconds).collect()),
            home_bytes: Samples::new(home_bytes.collect()),
        }
    }
}

/// How far simulated runs are from real ones.
#[derive(Debug, Default)]
pub(super) struct SimulationErrors {
    time_ratios: Vec<f64>,
    home_ratios: Vec<f64>,
    /// For each run that was simulated many times, whether the real one is among these: its time,
    /// and its traffic over the link to home.
    real_within: Vec<(bool, bool)>,
}

impl SimulationErrors {
    /// A real run, which took so many seconds and moved so many bytes over the link to home, with
    /// its simulations.
    pub(super) fn add_run(&mut self, seconds: f64, home_bytes: f64, simulated: &SimulatedResults) {
        let time = simulated.seconds.divided_by(seconds);
        let home = simulated.home_bytes.divided_by(home_bytes.max(1.0));
        let (has_time, has_home) = (has_ratio_one(&time), has_ratio_one(&home));
        println!(
            "  simulated {} s, really {} s: {time}{}; home traffic {home}{}",
            format_number(simulated.seconds.median()),
            format_number(seconds),
            format_has_one(has_time),
            format_has_one(has_home)
        );
        if let (Some(has_time), Some(has_home)) = (has_time, has_home) {
            self.real_within.push((has_time, has_home));
        }
        self.time_ratios.push(time.median());
        self.home_ratios.push(home.median());
    }

    /// Prints simulated over real, the largest distance from 1 of each kind, and how many real runs
    /// are among their simulations.
    pub(super) fn report_errors(self, report: &mut BenchmarkReport, part: &str) {
        let all = self.real_within.len() as f64;
        let share = |is_within: fn(&(bool, bool)) -> bool| {
            let within = self.real_within.iter().filter(|runs| is_within(runs));
            within.count() as f64 / all
        };
        if !self.real_within.is_empty() {
            let (time, home) = (share(|within| within.0), share(|within| within.1));
            report.print_line(&format!(
                "  real runs among the {SIMULATIONS} simulations of each: {} by their time, {} by \
                 what home sent, of 1",
                format_number(time),
                format_number(home)
            ));
            report.add_figure(&format!("{part}_real_time_within_simulated"), time);
            report.add_figure(&format!("{part}_real_home_within_simulated"), home);
        }
        for (what, ratios) in [("time", self.time_ratios), ("home", self.home_ratios)] {
            let worst = ratios
                .iter()
                .map(|ratio| (ratio - 1.0).abs())
                .fold(0.0, f64::max);
            let ratios = Samples::new(ratios);
            report.print_line(&format!(
                "  simulated over real {what}: {ratios}, largest error {}",
                format_number(worst)
            ));
            report.add_figure(&format!("{part}_simulated_{what}"), ratios.median());
            report.add_figure(&format!("{part}_simulated_{what}_error_max"), worst);
        }
    }
}

/// Whether simulated over real is 1 somewhere in its range, to half a thousandth; of one simulation
/// there is none.
fn has_ratio_one(ratios: &Samples) -> Option<bool> {
    let (least, most) = (ratios.min() - 0.0005, ratios.max() + 0.0005);
    (ratios.len() > 1).then_some(least <= 1.0 && 1.0 <= most)
}

fn format_has_one(has_one: Option<bool>) -> &'static str {
    match has_one {
        Some(true) => ", the real one among them",
        Some(false) => ", the real one NOT among them",
        None => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn real_run_is_compared_with_its_simulations() {
        let among = |ratios: &[f64]| has_ratio_one(&Samples::new(ratios.to_vec()));
        assert_eq!(among(&[0.95, 0.97, 1.1]), Some(true));
        assert_eq!(among(&[1.02, 1.1]), Some(false));
        assert_eq!(
            among(&[1.0004, 1.0004]),
            Some(true),
            "what is shown is 1.000"
        );
        assert_eq!(among(&[1.0]), None, "one simulation tells no range");
    }
}
