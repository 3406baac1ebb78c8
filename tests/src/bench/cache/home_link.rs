//! Many cold readers of one data set behind a slow link: how often each byte crosses it, and how
//! long it takes beside the time that the link alone needs; then the same without cooperation, and
//! without any cache.

use std::sync::Arc;

use anyhow::{Result, ensure};
use bafs_proto::message::MountTarget;

use super::part_outcome::{MIB, PartOutcome, ReadTask};
use crate::api::CacheSpec;
use crate::bench::machine::ProcessorTime;
use crate::bench::measure::{Samples, format_number, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::{CacheCluster, count_wrong_bytes, run_compare_job};
use crate::content::Content;

/// Rate of the link to home: as text of the command line, and in bytes per second.
const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

const NODES: usize = 16;

/// The readers on each node: jobs, each with a mount of its own and several unmodified programs,
/// and clients of the volume API.
#[derive(Debug, Clone, Copy)]
struct ReaderCounts {
    jobs: usize,
    programs: usize,
    api_clients: usize,
}

impl ReaderCounts {
    fn total(self) -> usize {
        NODES * (self.jobs * self.programs + self.api_clients)
    }

    fn describe(self) -> String {
        let Self {
            jobs,
            programs,
            api_clients: speakers,
        } = self;
        let programs = format!("{} x {programs} programs", NODES * jobs);
        match speakers {
            0 => programs,
            _ => format!("{programs}, {} by the API", NODES * speakers),
        }
    }
}

/// One job on each node, with many programs.
const PROGRAM_READERS: ReaderCounts = ReaderCounts {
    jobs: 1,
    programs: 16,
    api_clients: 0,
};

/// The figures of one run.
#[derive(Debug, Clone, Copy)]
struct LinkRun {
    seconds: f64,
    home_bytes: u64,
    wrong_bytes: u64,
    busy_fraction: f64,
}

/// Cold readers against the link alone.
pub(super) fn run_cold(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    let set = MIB * options.choose(256, 32);
    let content = Arc::new(Content::new(4, set));
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("cold", &content)?;
    let link_s = set as f64 / LINK_BYTES_PER_S;
    let readers = |jobs, programs, speakers| ReaderCounts {
        jobs,
        programs,
        api_clients: speakers,
    };
    let all = PROGRAM_READERS;
    // The last ones cost this machine more than the link gives: it runs all nodes and all readers.
    let kinds = [readers(1, 2, 0), all, readers(4, 1, 12)];
    report.print_section(&format!(
        "{} cold readers on {NODES} nodes, {} MiB behind {LINK}: the link alone takes {} s",
        all.total(),
        set / MIB,
        format_number(link_s)
    ));
    report.print_line(&format!(
        "  {} jobs with a mount of their own, {} programs (cmp) in each; every byte is compared. \
         The processors of one machine run all nodes, agents and programs.",
        NODES * all.jobs,
        all.programs
    ));
    let mut rows = vec![table_row([
        "readers",
        "jobs",
        "time / link",
        "home / set",
        "CPU busy",
        "wrong bytes",
    ])];
    let (mut times, mut ratios, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..options.choose(3, 1) {
        for (kind, readers) in kinds.into_iter().enumerate() {
            if kind == 2 && round > 0 {
                continue;
            }
            let cooperative = format!("cold-{round}-{kind}");
            let run = run_cached(&stage, &content, "cold", &cooperative, readers)?;
            let (time, ratio) = (run.seconds / link_s, run.home_bytes as f64 / set as f64);
            rows.push(table_row([
                &readers.total().to_string(),
                &readers.describe(),
                &format_number(time),
                &format_number(ratio),
                &format!("{:.0} %", 100.0 * run.busy_fraction),
                &run.wrong_bytes.to_string(),
            ]));
            wrong += run.wrong_bytes;
            if kind == 1 {
                times.push(time);
                ratios.push(ratio);
            }
        }
    }
    report.print_table(&rows);
    report.add_samples("home_read_ratio", &Samples::new(ratios));
    report.add_samples("time_vs_link", &Samples::new(times));
    Ok(PartOutcome { wrong_bytes: wrong })
}

/// Cooperation against independent caches, and against remote I/O.
pub(super) fn run_factors(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    let set = MIB * options.choose(16, 2);
    let readers = PROGRAM_READERS;
    let content = Arc::new(Content::new(5, set));
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("factor", &content)?;
    report.print_section(&format!(
        "{} cold readers on {NODES} nodes of {} MiB behind {LINK}: three ways",
        readers.total(),
        set / MIB
    ));
    let (mut rounds, mut wrong) = (Vec::new(), 0);
    for round in 0..options.choose(2, 1) {
        let together = format!("factor-{round}");
        let runs = [
            run_cached(&stage, &content, "factor", &together, readers)?,
            run_cached(&stage, &content, "factor", "", readers)?,
            run_remote(&stage, "factor", NODES)?,
            run_remote(&stage, "factor", NODES / 4)?,
        ];
        wrong += runs.iter().map(|run| run.wrong_bytes).sum::<u64>();
        rounds.push(runs);
    }
    let samples = |index: usize, of: fn(&LinkRun) -> f64| {
        Samples::new(rounds.iter().map(|runs| of(&runs[index])).collect())
    };
    let names = [
        "cooperative",
        "stand-alone caches",
        "remote I/O",
        "remote I/O",
    ];
    let counts = [readers.total(), readers.total(), NODES, NODES / 4];
    let mut rows = vec![table_row([
        "way",
        "readers",
        "seconds",
        "home / set",
        "time / cooperative",
    ])];
    for (index, (name, count)) in names.iter().zip(counts).enumerate() {
        let time = samples(index, |run| run.seconds);
        rows.push(table_row([
            name,
            &count.to_string(),
            &time.to_string(),
            &samples(index, |run| run.home_bytes as f64)
                .divided_by(set as f64)
                .to_string(),
            &time.ratio_to(&samples(0, |run| run.seconds)).to_string(),
        ]));
    }
    report.print_table(&rows);
    let alone = samples(1, |run| run.seconds).ratio_to(&samples(0, |run| run.seconds));
    report.add_samples("stand_alone_vs_cooperative", &alone);
    let scale = readers.total() as f64 / NODES as f64;
    let remote = samples(2, |run| run.seconds).ratio_to(&samples(0, |run| run.seconds));
    report.add_samples(
        "remote_vs_cooperative_extrapolated",
        &remote.divided_by(1.0 / scale),
    );
    report.print_line(&format!(
        "  EXTRAPOLATED: remote I/O ran with {NODES} readers and is scaled by {scale} to {}; the \
         runs with {} and {NODES} show that its time grows with the readers.",
        readers.total(),
        NODES / 4
    ));
    Ok(PartOutcome { wrong_bytes: wrong })
}

fn run_cached(
    stage: &CacheCluster,
    content: &Arc<Content>,
    directory: &str,
    cooperative: &str,
    readers: ReaderCounts,
) -> Result<LinkRun> {
    let size_bytes = content.bytes().len() as u64 + MIB as u64;
    let spec = CacheSpec {
        cooperative: cooperative.to_owned(),
        ..CacheSpec::new(directory, size_bytes)
    };
    let volumes = stage.create_caches(&stage.node_addresses(), &spec)?;
    let script = concurrent_script(&stage.compare_script(directory), readers.programs);
    let mut work: Vec<ReadTask> = Vec::new();
    for volume in &volumes {
        for _ in 0..readers.jobs {
            let (api_client, volume) = (stage.client.client().clone(), volume.clone());
            let script = script.clone();
            let target = volume.mount_target();
            work.push(Box::pin(run_compare_job(
                api_client,
                volume.node,
                target,
                script,
            )));
        }
        for _ in 0..readers.api_clients {
            let (api_client, volume) = (stage.new_reader()?, volume.clone());
            let content = content.clone();
            work.push(Box::pin(async move {
                count_wrong_bytes(api_client, volume, &content).await
            }));
        }
    }
    let run = measure(stage, work)?;
    stage.delete_volumes(&volumes)?;
    Ok(run)
}

/// A script that runs another one several times at once, and prints the sum of their outputs.
fn concurrent_script(script: &str, times: usize) -> String {
    format!(
        "{{ n=0; while [ $n -lt {times} ]; do ( {script} ) & n=$((n+1)); done; wait; }} | \
         awk '{{ sum += $1 }} END {{ if (NR != {times}) exit 3; print sum + 0 }}'"
    )
}

fn run_remote(stage: &CacheCluster, directory: &str, readers: usize) -> Result<LinkRun> {
    let script = stage.compare_script(directory);
    let home = stage.test_cluster.cluster.home_address().to_owned();
    let mut work: Vec<ReadTask> = Vec::new();
    for node in stage.node_addresses().into_iter().cycle().take(readers) {
        let target = MountTarget::Home {
            server: home.clone(),
            path: directory.to_owned(),
        };
        let api_client = stage.client.client().clone();
        work.push(Box::pin(run_compare_job(
            api_client,
            node,
            target,
            script.clone(),
        )));
    }
    measure(stage, work)
}

fn measure(stage: &CacheCluster, work: Vec<ReadTask>) -> Result<LinkRun> {
    let (before, processors) = (stage.read_home_bytes()?, ProcessorTime::now());
    let (seconds, wrong) = time_seconds(|| stage.client.run_all(work))?;
    let home_bytes = stage.read_home_bytes()? - before;
    ensure!(home_bytes > 0, "home was not asked: nothing was measured");
    Ok(LinkRun {
        seconds,
        home_bytes,
        wrong_bytes: wrong.iter().sum(),
        busy_fraction: processors.busy_fraction_since(),
    })
}
