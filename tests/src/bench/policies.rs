//! `bench policies`: what each alternative policy costs or gains beside the default of its family,
//! on a simulated workload where they differ. It needs no mount and no network.

use anyhow::{Context, Result, anyhow, ensure};
use bafs_proto::ids::ServerId;
use bafs_sched::{Outcome, PolicyNames, Settings, Space, list_policies};
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, build_canonical_workflow};
use bafs_workflow::parse_workflow;

use super::{BenchmarkReport, Options};

const MB: u64 = 1_000_000;

/// Standard deviation of run times over their mean, in millionths.
const VARIABILITY_PPM: u32 = 100_000;

/// Jobs of the run with a node on which every job fails, and how often each may fail.
const FAILING_NODE_JOBS: u32 = 120;
const FAILING_NODE_RETRIES: u32 = 3;

/// A workload on which the policies of a family differ.
struct PolicyCase {
    family: &'static str,
    /// What it is, in a few words.
    title: &'static str,
    run: CaseRun,
}

/// What is simulated.
enum CaseRun {
    /// Equal pipelines, as `bafs sim --canonical` reads them.
    Canonical {
        workload: &'static str,
        environment: fn() -> Environment,
        start: Policy,
    },
    /// Independent jobs, all of which fail on one of eight nodes.
    FailingNode,
}

/// One for each family with an alternative. Sizes of the first are those of the thesis' synthetic
/// workloads (Bent 2005, section 6.2), scaled to seconds; those of the last are its mixed baseline
/// (Table 4.5).
const CASES: [PolicyCase; 6] = [
    PolicyCase {
        family: "order",
        title: "two levels, one batch volume at a time fits",
        run: CaseRun::Canonical {
            workload: "width=64,depth=3,batch=800MB,private=20MB,run=30s,var=0.1",
            environment: || environment(8, 1, 220, [20, 100]),
            start: Policy::Need,
        },
    },
    PolicyCase {
        family: "placement",
        title: "more slots than pipelines, and disks ten times as fast as the network",
        run: CaseRun::Canonical {
            workload: "width=14,depth=4,batch=0B,private=500MB,run=20s,var=0.1",
            environment: || on_fast_disks(environment(8, 2, 20_000, [50, 20])),
            start: Policy::Need,
        },
    },
    PolicyCase {
        family: "cache_space",
        title: "a database that fits on every node, and disks faster than the network",
        run: CaseRun::Canonical {
            workload: "width=64,depth=1,batch=400MB,private=10MB,run=20s,var=0.1",
            environment: || on_fast_disks(environment(8, 2, 10_000, [50, 10])),
            start: Policy::Need,
        },
    },
    PolicyCase {
        family: "replication",
        title: "a node fails every ten minutes",
        run: CaseRun::Canonical {
            workload: "width=64,depth=3,batch=0B,private=24MB,run=600s,var=0.1",
            environment: || Environment {
                mtbf_s: Some(600),
                ..environment(16, 1, 4_000, [400, 400])
            },
            start: Policy::Need,
        },
    },
    PolicyCase {
        family: "failure",
        title: "every job fails on one of eight nodes",
        run: CaseRun::FailingNode,
    },
    PolicyCase {
        family: "strategy",
        title: "half of the nodes come a day later",
        run: CaseRun::Canonical {
            workload: "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1",
            environment: with_late_half,
            start: Policy::Adaptive,
        },
    },
];

/// Equal nodes, whose rates are of the link to home and of the network, in MB/s.
fn environment(nodes: u32, slots: u32, storage_mb: u64, rates: [u64; 2]) -> Environment {
    let [home, local] = rates.map(|rate| rate * MB);
    Environment {
        nodes: vec![NodeClass::new(nodes, slots, storage_mb * MB)],
        home_bytes_per_s: home,
        local_bytes_per_s: local,
        mtbf_s: None,
        restart_s: 16,
    }
}

/// The same nodes with disks of 200 MB/s, and with blocks spread by their hashes as on real nodes.
fn on_fast_disks(mut environment: Environment) -> Environment {
    for class in &mut environment.nodes {
        class.disk_bytes_per_s = Some(200 * MB);
        class.has_hash_imbalance = true;
    }
    environment
}

/// The environment of the thesis with 30 nodes, and 30 more after a day.
fn with_late_half() -> Environment {
    let mut environment = environment(30, 1, 5_000, [1, 12]);
    let later = NodeClass {
        arrival_s: 86_400,
        ..environment.nodes[0].clone()
    };
    environment.nodes.push(later);
    environment
}

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
        let seconds = match &self.run {
            CaseRun::Canonical {
                workload,
                environment,
                start,
            } => self.simulate_canonical(name, seed, (workload, environment(), *start))?,
            CaseRun::FailingNode => self.simulate_failing_node(name, seed)?,
        };
        seconds.with_context(|| format!("{} {name}: the run failed", self.family))
    }

    /// Seconds of a run with a seed; nothing if it fails.
    fn simulate_canonical(
        &self,
        name: &str,
        seed: u64,
        (workload, environment, start): (&str, Environment, Policy),
    ) -> Result<Option<f64>> {
        let canonical = CanonicalWorkload::parse(workload).map_err(|error| anyhow!("{error}"))?;
        let load = LoadModel::Declared {
            variability_ppm: u64::from(VARIABILITY_PPM),
        };
        let usual = Scenario::new(environment, start, load, seed);
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
        let run = run.map_err(|stuck| anyhow!("{stuck}"))?;
        Ok(run.is_complete().then(|| run.seconds()))
    }

    /// The same for jobs on nodes of which one fails them all.
    fn simulate_failing_node(&self, name: &str, seed: u64) -> Result<Option<f64>> {
        let mut text = String::new();
        for job in 0..FAILING_NODE_JOBS {
            text += &format!(
                "job j{job} {{\nexecutable = x\nretry = {FAILING_NODE_RETRIES}\n}}\n\
                 volume v{job} scratch 1 MB\nmount v{job} j{job} /v\n"
            );
        }
        let none = |path: &str| Err(path.to_owned());
        let parsed = parse_workflow("w.bafs", &text, &none).map_err(|error| anyhow!("{error}"))?;
        let settings = Settings {
            policies: PolicyNames::default().with(self.family, name),
            ..Settings::default()
        };
        let node = NodeSpec {
            capacity: Space {
                bytes: 1_000_000_000,
                files: 1_000_000,
            },
            slots: 1,
        };
        let faults = Faults {
            poison_node: Some(ServerId(2)),
            ..Faults::default()
        };
        let nodes = vec![node; 8];
        let mut run = SimulatedCluster::new(seed, parsed.workflow, settings, nodes, faults);
        let is_complete = run.run_to_end(10_000_000) == Outcome::Complete;
        Ok(is_complete.then(|| run.elapsed_ms() as f64 / 1e3))
    }
}
