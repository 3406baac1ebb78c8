//! Seeded workloads and machines for comparisons: equal pipelines, and graphs with shared data. It
//! simulates nothing.

use std::fmt::Write;

use bafs_sim::seeded_rng::SeededRng;

const MB: u64 = 1_000_000;

/// What a program is asked to simulate.
#[derive(Debug, Clone)]
pub(super) struct ComparedCase {
    pub(super) seed: u64,
    pub(super) workload: ComparedWorkload,
    /// The environment file.
    pub(super) environment: String,
    /// Whether nodes fail, and whether their storage is scarce.
    pub(super) has_failures: bool,
    pub(super) is_tight: bool,
}

/// What runs.
#[derive(Debug, Clone)]
pub(super) enum ComparedWorkload {
    /// Equal pipelines, as `--canonical` reads them.
    Pipelines(String),
    /// A workflow file.
    Graph(String),
}

impl ComparedCase {
    /// The case of a seed.
    pub(super) fn of_seed(seed: u64) -> Self {
        let mut rng = SeededRng::new(seed ^ 0xc0de);
        let nodes = 1 + rng.next_below(24);
        let has_failures = rng.next_bool(400);
        let is_tight = rng.next_bool(500);
        let private = (5 + rng.next_below(200)) * MB;
        let batch = match rng.next_bool(750) {
            true => (20 + rng.next_below(1_500)) * MB,
            false => 0,
        };
        let workload = match rng.next_bool(600) {
            true => ComparedWorkload::Pipelines(describe_pipelines(&mut rng, batch, private)),
            false => ComparedWorkload::Graph(describe_graph(&mut rng, batch, private)),
        };
        // What one pipeline needs at once on a node, and its part of each of two caches.
        let least = 4 * private + 5 * batch / (2 * nodes);
        let more_percent = match is_tight {
            true => 2 + rng.next_below(60),
            false => 100 + rng.next_below(900),
        };
        let storage = least + least * more_percent / 100;
        let environment = describe_machines(&mut rng, nodes, storage, has_failures);
        Self {
            seed,
            workload,
            environment,
            has_failures,
            is_tight,
        }
    }

    /// Its name in a table.
    pub(super) fn class(&self, policy: &str) -> String {
        let shape = match self.workload {
            ComparedWorkload::Pipelines(_) => "pipelines",
            ComparedWorkload::Graph(_) => "graph",
        };
        let by = match policy {
            "need" | "adaptive" => policy,
            _ => "strategy",
        };
        let failures = if self.has_failures {
            "failures"
        } else {
            "no failures"
        };
        let space = if self.is_tight { "tight" } else { "roomy" };
        format!("{shape}, {by}, {failures}, {space}")
    }
}

fn describe_pipelines(rng: &mut SeededRng, batch: u64, private: u64) -> String {
    let (width, depth) = (2 + rng.next_below(60), 1 + rng.next_below(5));
    let (run, percent) = (5 + rng.next_below(600), rng.next_below(50));
    format!(
        "width={width},depth={depth},batch={}MB,private={}MB,run={run}s,var=0.{percent:02}",
        batch / MB,
        private / MB
    )
}

/// Layers of jobs, each of which reads what some jobs of the layer before wrote, and maybe one of
/// the data sets.
fn describe_graph(rng: &mut SeededRng, batch: u64, private: u64) -> String {
    let (layers, width) = (1 + rng.next_below(4), 2 + rng.next_below(16));
    let caches = match batch {
        0 => 0,
        _ => 1 + rng.next_below(3),
    };
    let mut text = String::new();
    for cache in 0..caches {
        let bytes = batch / (cache + 1);
        let _ = writeln!(text, "volume c{cache} cache bafs://home/c{cache} {bytes} B");
    }
    for layer in 0..layers {
        for at in 0..width {
            let seconds = 1 + rng.next_below(600);
            let bytes = private / 2 + rng.next_below(private / 2);
            let _ = writeln!(
                text,
                "job j{layer}_{at} {{\n  executable = x\n  runtime = {seconds} s\n}}\n\
                 volume v{layer}_{at} scratch {bytes} B\n\
                 mount v{layer}_{at} j{layer}_{at} /out"
            );
            let readers = if layer == 0 { 0 } else { 1 + rng.next_below(2) };
            for reader in 0..readers {
                let other = (at + reader * (1 + rng.next_below(width - 1))) % width;
                if reader > 0 && other == at {
                    continue;
                }
                let before = format!("{}_{other}", layer - 1);
                let _ = writeln!(
                    text,
                    "parent j{before} child j{layer}_{at}\n\
                     mount v{before} j{layer}_{at} /in{reader} ro"
                );
            }
            if caches > 0 && rng.next_bool(700) {
                let cache = rng.next_below(caches);
                let _ = writeln!(text, "mount c{cache} j{layer}_{at} /data");
            }
        }
    }
    for at in 0..width {
        let last = layers - 1;
        let _ = writeln!(text, "extract v{last}_{at} out bafs://home/out{at}");
    }
    text
}

fn describe_machines(rng: &mut SeededRng, nodes: u64, storage: u64, has_failures: bool) -> String {
    let home = 1 + rng.next_below(100);
    let local = 20 + rng.next_below(200);
    let imbalance = rng.next_bool(500);
    let mut text = format!(
        "home-rate = \"{home} MB/s\"\nlocal-rate = \"{local} MB/s\"\nhash-imbalance = {imbalance}\n"
    );
    if has_failures {
        let _ = writeln!(text, "mtbf = \"{} s\"", 600 + rng.next_below(20_000));
    }
    let cpus = 1 + rng.next_below(3);
    let _ = writeln!(
        text,
        "[[nodes]]\ncount = {nodes}\ncpus = {cpus}\nstorage = \"{storage} B\""
    );
    text
}
