//! Many cold readers of one data set behind a slow link: how often each byte crosses it, and how
//! long it takes beside the time that the link alone needs; then the same without cooperation, and
//! without any cache.

use std::sync::Arc;

use anyhow::{Result, ensure};
use bafs_proto::message::MountTarget;

use super::{MIB, Outcome, Work, row};
use crate::api::CacheSpec;
use crate::bench::machine::Processors;
use crate::bench::measure::{Samples, digits, seconds};
use crate::bench::{Options, Report};
use crate::content::Content;
use crate::stage::{CacheCluster, compare, scan};

/// Rate of the link to home: as the command line says it, and in bytes per second.
const LINK: &str = "8MB/s";
const LINK_BYTES_PER_S: f64 = 8e6;

const NODES: usize = 16;

/// Who reads on each node: jobs, each with a mount of its own, with several unmodified programs at
/// once, and readers that speak the volume API.
#[derive(Debug, Clone, Copy)]
struct Readers {
    jobs: usize,
    programs: usize,
    speakers: usize,
}

impl Readers {
    fn count(self) -> usize {
        NODES * (self.jobs * self.programs + self.speakers)
    }

    fn describe(self) -> String {
        let Self {
            jobs,
            programs,
            speakers,
        } = self;
        let programs = format!("{} x {programs} programs", NODES * jobs);
        match speakers {
            0 => programs,
            _ => format!("{programs}, {} by the API", NODES * speakers),
        }
    }
}

/// One job on each node, with many programs.
const PROGRAMS: Readers = Readers {
    jobs: 1,
    programs: 16,
    speakers: 0,
};

/// What one run took.
#[derive(Debug, Clone, Copy)]
struct Run {
    seconds: f64,
    home_bytes: u64,
    wrong_bytes: u64,
    busy: f64,
}

/// Cold readers against the link alone.
pub(super) fn cold(options: &Options, report: &mut Report) -> Result<Outcome> {
    let set = MIB * options.pick(256, 32);
    let content = Arc::new(Content::new(4, set));
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("cold", &content)?;
    let link_s = set as f64 / LINK_BYTES_PER_S;
    let readers = |jobs, programs, speakers| Readers {
        jobs,
        programs,
        speakers,
    };
    let all = PROGRAMS;
    // The last ones cost this machine more than the link gives: it runs all nodes and all readers.
    let kinds = [readers(1, 2, 0), all, readers(4, 1, 12)];
    report.section(&format!(
        "{} cold readers on {NODES} nodes, {} MiB behind {LINK}: the link alone takes {} s",
        all.count(),
        set / MIB,
        digits(link_s)
    ));
    report.say(&format!(
        "  {} jobs with a mount of their own, {} programs (cmp) in each; every byte is compared. \
         The processors of one machine run all nodes, agents and programs.",
        NODES * all.jobs,
        all.programs
    ));
    let mut rows = vec![row([
        "readers",
        "jobs",
        "time / link",
        "home / set",
        "CPU busy",
        "wrong bytes",
    ])];
    let (mut times, mut ratios, mut wrong) = (Vec::new(), Vec::new(), 0);
    for round in 0..options.pick(3, 1) {
        for (kind, readers) in kinds.into_iter().enumerate() {
            if kind == 2 && round > 0 {
                continue;
            }
            let cooperative = format!("cold-{round}-{kind}");
            let run = run_cached(&stage, &content, "cold", &cooperative, readers)?;
            let (time, ratio) = (run.seconds / link_s, run.home_bytes as f64 / set as f64);
            rows.push(row([
                &readers.count().to_string(),
                &readers.describe(),
                &digits(time),
                &digits(ratio),
                &format!("{:.0} %", 100.0 * run.busy),
                &run.wrong_bytes.to_string(),
            ]));
            wrong += run.wrong_bytes;
            if kind == 1 {
                times.push(time);
                ratios.push(ratio);
            }
        }
    }
    report.table(&rows);
    report.measured("home_read_ratio", &Samples::new(ratios));
    report.measured("time_vs_link", &Samples::new(times));
    Ok(Outcome { wrong_bytes: wrong })
}

/// Cooperation against caches that stand alone, and against remote I/O.
pub(super) fn factors(options: &Options, report: &mut Report) -> Result<Outcome> {
    let set = MIB * options.pick(16, 2);
    let readers = PROGRAMS;
    let content = Arc::new(Content::new(5, set));
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    stage.write_data_set("factor", &content)?;
    report.section(&format!(
        "{} cold readers on {NODES} nodes of {} MiB behind {LINK}: three ways",
        readers.count(),
        set / MIB
    ));
    let (mut rounds, mut wrong) = (Vec::new(), 0);
    for round in 0..options.pick(2, 1) {
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
    let samples = |index: usize, of: fn(&Run) -> f64| {
        Samples::new(rounds.iter().map(|runs| of(&runs[index])).collect())
    };
    let names = [
        "cooperative",
        "stand-alone caches",
        "remote I/O",
        "remote I/O",
    ];
    let counts = [readers.count(), readers.count(), NODES, NODES / 4];
    let mut rows = vec![row([
        "way",
        "readers",
        "seconds",
        "home / set",
        "time / cooperative",
    ])];
    for (index, (name, count)) in names.iter().zip(counts).enumerate() {
        let time = samples(index, |run| run.seconds);
        rows.push(row([
            name,
            &count.to_string(),
            &time.to_string(),
            &samples(index, |run| run.home_bytes as f64)
                .per(set as f64)
                .to_string(),
            &time.ratio_to(&samples(0, |run| run.seconds)).to_string(),
        ]));
    }
    report.table(&rows);
    let alone = samples(1, |run| run.seconds).ratio_to(&samples(0, |run| run.seconds));
    report.measured("stand_alone_vs_cooperative", &alone);
    let scale = readers.count() as f64 / NODES as f64;
    let remote = samples(2, |run| run.seconds).ratio_to(&samples(0, |run| run.seconds));
    report.measured(
        "remote_vs_cooperative_extrapolated",
        &remote.per(1.0 / scale),
    );
    report.say(&format!(
        "  EXTRAPOLATED: remote I/O ran with {NODES} readers and is scaled by {scale} to {}; the \
         runs with {} and {NODES} show that its time grows with the readers.",
        readers.count(),
        NODES / 4
    ));
    Ok(Outcome { wrong_bytes: wrong })
}

fn run_cached(
    stage: &CacheCluster,
    content: &Arc<Content>,
    directory: &str,
    cooperative: &str,
    readers: Readers,
) -> Result<Run> {
    let size_bytes = content.bytes().len() as u64 + MIB as u64;
    let wish = CacheSpec {
        cooperative: cooperative.to_owned(),
        ..CacheSpec::new(directory, size_bytes)
    };
    let volumes = stage.caches(&stage.nodes(), &wish)?;
    let script = at_once(&stage.compare_script(directory), readers.programs);
    let mut work: Vec<Work> = Vec::new();
    for volume in &volumes {
        for _ in 0..readers.jobs {
            let (speaker, volume) = (stage.client.client().clone(), volume.clone());
            let script = script.clone();
            let target = volume.mount_target();
            work.push(Box::pin(compare(speaker, volume.node, target, script)));
        }
        for _ in 0..readers.speakers {
            let (speaker, volume) = (stage.reader()?, volume.clone());
            let content = content.clone();
            work.push(Box::pin(
                async move { scan(speaker, volume, &content).await },
            ));
        }
    }
    let run = measure(stage, work)?;
    stage.delete(&volumes)?;
    Ok(run)
}

/// A script that runs another one several times at once, and prints the sum of what they print.
fn at_once(script: &str, times: usize) -> String {
    format!(
        "{{ n=0; while [ $n -lt {times} ]; do ( {script} ) & n=$((n+1)); done; wait; }} | \
         awk '{{ sum += $1 }} END {{ if (NR != {times}) exit 3; print sum + 0 }}'"
    )
}

fn run_remote(stage: &CacheCluster, directory: &str, readers: usize) -> Result<Run> {
    let script = stage.compare_script(directory);
    let home = stage.test_cluster.cluster.home_address().to_owned();
    let mut work: Vec<Work> = Vec::new();
    for node in stage.nodes().into_iter().cycle().take(readers) {
        let target = MountTarget::Home {
            server: home.clone(),
            path: directory.to_owned(),
        };
        let speaker = stage.client.client().clone();
        work.push(Box::pin(compare(speaker, node, target, script.clone())));
    }
    measure(stage, work)
}

fn measure(stage: &CacheCluster, work: Vec<Work>) -> Result<Run> {
    let (before, processors) = (stage.home_bytes()?, Processors::now());
    let (seconds, wrong) = seconds(|| stage.client.run_all(work))?;
    let home_bytes = stage.home_bytes()? - before;
    ensure!(home_bytes > 0, "home was not asked: nothing was measured");
    Ok(Run {
        seconds,
        home_bytes,
        wrong_bytes: wrong.iter().sum(),
        busy: processors.busy_since(),
    })
}
