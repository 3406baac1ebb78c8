//! BLAST over a database that no single node can hold but all nodes together can: cooperative
//! caches against independent caches. The results must be those of a plain directory.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_proto::message::JobOutcome;

use super::part_outcome::{PartOutcome, ReadTask};
use crate::api::CacheSpec;
use crate::bench::measure::{Samples, format_number, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};
use crate::cache_cluster::CacheCluster;

const NODES: usize = 4;
const LINK: &str = "8MB/s";

/// Jobs on each node, one after the other.
const JOBS_PER_NODE: usize = 2;

/// Space of each node's cache, as a share of the database.
const CACHE_FRACTION: f64 = 0.35;

/// The figures of one run.
struct BlastRun {
    seconds: f64,
    home_bytes: u64,
    wrong_results: u64,
}

/// Both ways, in turns.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<PartOutcome> {
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("jobs with volumes cannot run here: {reason}");
    }
    let stage = CacheCluster::start(NODES, "2GB", Some(LINK))?;
    let home = stage.test_cluster.home.path().to_owned();
    let residues = options.choose(25, 4) << 20;
    let queries = u32::try_from(NODES * JOBS_PER_NODE)?;
    let prepared = bafs::demo::prepare_input(&home, residues, queries, 1);
    stage.client.block_on(prepared)?;
    let database = directory_bytes(&home.join("db"))?;
    let share = (database as f64 * CACHE_FRACTION) as u64;
    let expected = expected_results(&home)?;
    report.print_section(&format!(
        "blastp, {} searches on {NODES} nodes, database of {:.1} MB behind {LINK}, {:.1} MB of \
         cache on each node",
        NODES * JOBS_PER_NODE,
        database as f64 / 1e6,
        share as f64 / 1e6
    ));
    let mut rows = vec![table_row([
        "caches",
        "seconds",
        "home / database",
        "wrong results",
    ])];
    let (mut together, mut alone, mut wrong) = (vec![], vec![], 0);
    for round in 0..options.choose(2, 1) {
        for cooperative in [format!("blast-{round}"), String::new()] {
            let spec = CacheSpec {
                cooperative: cooperative.clone(),
                ..CacheSpec::new("db", share)
            };
            let run = run_once(&stage, &spec, &expected)?;
            wrong += run.wrong_results;
            let is_alone = cooperative.is_empty();
            rows.push(table_row([
                if is_alone {
                    "stand-alone"
                } else {
                    "cooperative"
                },
                &format_number(run.seconds),
                &format_number(run.home_bytes as f64 / database as f64),
                &run.wrong_results.to_string(),
            ]));
            if is_alone { &mut alone } else { &mut together }.push(run);
        }
    }
    report.print_table(&rows);
    let time = |runs: &[BlastRun]| Samples::new(runs.iter().map(|run| run.seconds).collect());
    let sent =
        |runs: &[BlastRun]| Samples::new(runs.iter().map(|run| run.home_bytes as f64).collect());
    report.add_samples(
        "blast_alone_vs_cooperative",
        &time(&alone).ratio_to(&time(&together)),
    );
    report.add_samples(
        "blast_home_read_ratio",
        &sent(&together).divided_by(database as f64),
    );
    report.add_samples(
        "blast_home_alone_vs_cooperative",
        &sent(&alone).ratio_to(&sent(&together)),
    );
    Ok(PartOutcome { wrong_bytes: wrong })
}

/// The script of a search, which prints a check sum of its results.
fn search_script(query: usize, home: &str, database: &str) -> String {
    let query = query + 1;
    format!(
        "set -e; blastp -db {database}/proteins -query {home}/queries/q{query:02}.fa -evalue 1e-3 \
         -outfmt 6 | cksum"
    )
}

/// The results of each search in the plain directory.
fn expected_results(home: &Path) -> Result<Vec<String>> {
    let home = home.to_str().context("a path is text")?;
    let searches =
        (0..NODES * JOBS_PER_NODE).map(|query| search_script(query, home, &format!("{home}/db")));
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
fn run_once(stage: &CacheCluster, spec: &CacheSpec, expected: &[String]) -> Result<BlastRun> {
    let volumes = stage.create_caches(&stage.node_addresses(), spec)?;
    let home = stage
        .test_cluster
        .home
        .path()
        .to_str()
        .context("a path is text")?;
    let mut work: Vec<ReadTask> = Vec::new();
    for (index, volume) in volumes.iter().enumerate() {
        let (api_client, volume) = (stage.client.client().clone(), volume.clone());
        let jobs: Vec<_> = (0..JOBS_PER_NODE)
            .map(|wave| wave * NODES + index)
            .map(|query| (search_script(query, home, "/data"), expected[query].clone()))
            .collect();
        work.push(Box::pin(async move {
            let mut wrong = 0;
            for (script, expected) in jobs {
                let job = api_client.start_job(&volume.node, volume.mount_target(), &script);
                let report = api_client.wait_for_job(&volume.node, job.await?).await?;
                let said = report.output_tail.trim().to_owned();
                let ended = report.outcome == JobOutcome::Exited(0);
                ensure!(ended, "{:?}: {said}", report.outcome);
                wrong += u64::from(said != expected);
            }
            Ok(wrong)
        }));
    }
    let before = stage.read_home_bytes()?;
    let (time, wrong) = time_seconds(|| stage.client.run_all(work))?;
    let home_bytes = stage.read_home_bytes()? - before;
    stage.delete_volumes(&volumes)?;
    Ok(BlastRun {
        seconds: time,
        home_bytes,
        wrong_results: wrong.iter().sum(),
    })
}

fn directory_bytes(directory: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(directory)? {
        sum += entry?.metadata()?.len();
    }
    Ok(sum)
}
