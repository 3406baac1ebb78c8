//! BLAST over a database that no single node can hold but all nodes together can: cooperative
//! caches beside caches that stand alone. The results must be those of a plain directory.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_proto::message::JobOutcome;

use super::{Outcome, Work, row};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, digits, seconds};
use crate::bench::{Options, Report};
use crate::stage::CacheCluster;

const NODES: usize = 4;
const LINK: &str = "8MB/s";

/// Jobs on each node, one after the other.
const WAVES: usize = 2;

/// Space of each node's cache, as a share of the database.
const SHARE: f64 = 0.35;

/// What one run took.
struct Run {
    seconds: f64,
    home_bytes: u64,
    wrong: u64,
}

/// Both ways, in turns.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<Outcome> {
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    let home = stage.test_cluster.home.path().to_owned();
    let residues = options.pick(25, 4) << 20;
    let queries = u32::try_from(NODES * WAVES)?;
    let prepared = bafs::demo::prepare_input(&home, residues, queries, 1);
    stage.client.block_on(prepared)?;
    let database = size_of(&home.join("db"))?;
    let share = (database as f64 * SHARE) as u64;
    let expected = expected_results(&home)?;
    report.section(&format!(
        "blastp, {} searches on {NODES} nodes, database of {:.1} MB behind {LINK}, {:.1} MB of \
         cache on each node",
        NODES * WAVES,
        database as f64 / 1e6,
        share as f64 / 1e6
    ));
    let mut rows = vec![row([
        "caches",
        "seconds",
        "home / database",
        "wrong results",
    ])];
    let (mut together, mut alone, mut wrong) = (vec![], vec![], 0);
    for round in 0..options.pick(2, 1) {
        for cooperative in [format!("blast-{round}"), String::new()] {
            let wish = CacheSpec {
                cooperative: cooperative.clone(),
                ..CacheSpec::new("db", share)
            };
            let run = once(&stage, &wish, &expected)?;
            wrong += run.wrong;
            let is_alone = cooperative.is_empty();
            rows.push(row([
                if is_alone {
                    "stand-alone"
                } else {
                    "cooperative"
                },
                &digits(run.seconds),
                &digits(run.home_bytes as f64 / database as f64),
                &run.wrong.to_string(),
            ]));
            if is_alone { &mut alone } else { &mut together }.push(run);
        }
    }
    report.table(&rows);
    let time = |runs: &[Run]| Samples::new(runs.iter().map(|run| run.seconds).collect());
    let sent = |runs: &[Run]| Samples::new(runs.iter().map(|run| run.home_bytes as f64).collect());
    report.measured(
        "blast_alone_vs_cooperative",
        &time(&alone).ratio_to(&time(&together)),
    );
    report.measured(
        "blast_home_read_ratio",
        &sent(&together).per(database as f64),
    );
    report.measured(
        "blast_home_alone_vs_cooperative",
        &sent(&alone).ratio_to(&sent(&together)),
    );
    Ok(Outcome { wrong_bytes: wrong })
}

/// The script of a search, which prints a check sum of its results.
fn search(query: usize, home: &str, database: &str) -> String {
    let query = query + 1;
    format!(
        "set -e; blastp -db {database}/proteins -query {home}/queries/q{query:02}.fa -evalue 1e-3 \
         -outfmt 6 | cksum"
    )
}

/// What each search finds in the plain directory.
fn expected_results(home: &Path) -> Result<Vec<String>> {
    let home = home.to_str().context("a path is text")?;
    let searches = (0..NODES * WAVES).map(|query| search(query, home, &format!("{home}/db")));
    let run = |script: String| {
        let output = Command::new("/bin/sh").args(["-c", &script]).output()?;
        ensure!(
            output.status.success(),
            "blastp failed on a plain directory"
        );
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    searches.map(run).collect()
}

/// Runs all searches: on each node one after the other, all nodes at once.
fn once(stage: &CacheCluster, wish: &CacheSpec, expected: &[String]) -> Result<Run> {
    let volumes = stage.caches(&stage.nodes(), wish)?;
    let home = stage.test_cluster.home.path().to_str().context("a path is text")?;
    let mut work: Vec<Work> = Vec::new();
    for (index, volume) in volumes.iter().enumerate() {
        let (speaker, volume) = (stage.client.client().clone(), volume.clone());
        let jobs: Vec<_> = (0..WAVES)
            .map(|wave| wave * NODES + index)
            .map(|query| (search(query, home, "/data"), expected[query].clone()))
            .collect();
        work.push(Box::pin(async move {
            let mut wrong = 0;
            for (script, expected) in jobs {
                let job = speaker.start_job(&volume.node, volume.mount_target(), &script);
                let report = speaker.wait_for_job(&volume.node, job.await?).await?;
                let said = report.output_tail.trim().to_owned();
                let ended = report.outcome == JobOutcome::Exited(0);
                ensure!(ended, "{:?}: {said}", report.outcome);
                wrong += u64::from(said != expected);
            }
            Ok(wrong)
        }));
    }
    let before = stage.home_bytes()?;
    let (time, wrong) = seconds(|| stage.client.run_all(work))?;
    let home_bytes = stage.home_bytes()? - before;
    stage.delete(&volumes)?;
    Ok(Run {
        seconds: time,
        home_bytes,
        wrong: wrong.iter().sum(),
    })
}

fn size_of(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(directory)? {
        sum += entry?.metadata()?.len();
    }
    Ok(sum)
}
