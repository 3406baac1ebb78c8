//! `bench policies`: what each alternative policy costs or gains beside the default of its family,
//! on a simulated workload where they differ. It needs no mount and no network.

use anyhow::{Context, Result, ensure};
use bafs_sched::{PolicyNames, list_policies};
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, build_canonical_workflow};

use super::{BenchmarkReport, Options};

const MB: u64 = 1_000_000;

/// Standard deviation of run times over their mean, in millionths.
const VARIABILITY_PPM: u32 = 100_000;

/// A workload on which the policies of a family differ.
struct PolicyCase {
    family: &'static str,
    /// What it is, in a few words.
    title: &'static str,
    /// Equal pipelines, as `bafs sim --canonical` reads them.
    workload: &'static str,
    nodes: u32,
    slots: u32,
    storage_mb: u64,
    home_mb_per_s: u64,
    local_mb_per_s: u64,
    mtbf_s: Option<u64>,
}

/// One for each family that a canonical workload can tell apart. Sizes of the first are those of
/// the thesis' synthetic workloads (Bent 2005, section 6.2), scaled to seconds.
const CASES: [PolicyCase; 4] = [
    PolicyCase {
        family: "order",
        title: "two levels, one batch volume at a time fits",
        workload: "width=64,depth=3,batch=800MB,private=20MB,run=30s,var=0.1",
        nodes: 8,
        slots: 1,
        storage_mb: 220,
        home_mb_per_s: 20,
        local_mb_per_s: 100,
        mtbf_s: None,
    },
    PolicyCase {
        family: "placement",
        title: "much private data, slow links between nodes",
        workload: "width=32,depth=4,batch=0B,private=500MB,run=20s,var=0.1",
        nodes: 8,
        slots: 2,
        storage_mb: 20_000,
        home_mb_per_s: 100,
        local_mb_per_s: 20,
        mtbf_s: None,
    },
    PolicyCase {
        family: "cache_space",
        title: "a batch volume of which each node could hold all, slow links between nodes",
        workload: "width=64,depth=1,batch=400MB,private=10MB,run=20s,var=0.1",
        nodes: 8,
        slots: 2,
        storage_mb: 10_000,
        home_mb_per_s: 50,
        local_mb_per_s: 10,
        mtbf_s: None,
    },
    PolicyCase {
        family: "replication",
        title: "a node fails every ten minutes",
        workload: "width=64,depth=3,batch=0B,private=24MB,run=600s,var=0.1",
        nodes: 16,
        slots: 1,
        storage_mb: 4_000,
        home_mb_per_s: 400,
        local_mb_per_s: 400,
        mtbf_s: Some(600),
    },
];

/// Simulates each policy of each case.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    ensure!(options.only.is_empty(), "this benchmark has no parts");
    let seeds = *options.choose(&20, &3);
    for case in &CASES {
        report.print_section(&format!("{}: {}", case.family, case.title));
        let all = list_policies();
        let mut usual_s = None;
        for policy in all.iter().filter(|policy| policy.family == case.family) {
            let seconds = case.mean_seconds(policy.name, seeds)?;
            let usual_s = *usual_s.get_or_insert(seconds);
            let ratio = seconds / usual_s;
            let name = format!("{}_{}", case.family, policy.name.replace('-', "_"));
            report.print_line(&format!("{:<16} {seconds:.1} s, {ratio:.3}", policy.name));
            if !policy.is_default {
                report.add_figure(&name, ratio);
            }
        }
    }
    Ok(())
}

impl PolicyCase {
    fn mean_seconds(&self, name: &str, seeds: u64) -> Result<f64> {
        let mut sum = 0.0;
        for seed in 1..=seeds {
            sum += self.seconds(name, seed)?;
        }
        Ok(sum / seeds as f64)
    }

    fn seconds(&self, name: &str, seed: u64) -> Result<f64> {
        let canonical =
            CanonicalWorkload::parse(self.workload).map_err(|error| anyhow::anyhow!("{error}"))?;
        let environment = Environment {
            nodes: vec![NodeClass::new(self.nodes, self.slots, self.storage_mb * MB)],
            home_bytes_per_s: self.home_mb_per_s * MB,
            local_bytes_per_s: self.local_mb_per_s * MB,
            mtbf_s: self.mtbf_s,
            restart_s: 16,
        };
        let load = LoadModel::Declared {
            variability_ppm: u64::from(VARIABILITY_PPM),
        };
        let usual = Scenario::new(environment, Policy::Need, load, seed);
        let replicates = self.family == "replication";
        let names = if replicates {
            PolicyNames::default()
        } else {
            usual.policies.clone()
        };
        let scenario = Scenario {
            policies: names.with(self.family, name),
            ..usual
        };
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.map_err(|stuck| anyhow::anyhow!("{stuck}"))?;
        let complete = run.is_complete().then(|| run.seconds());
        complete.with_context(|| format!("{} {name}: the run failed", self.family))
    }
}
