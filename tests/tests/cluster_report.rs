//! What a run on real processes says of itself: the ledger's sums, the page, the graph, the state.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};
use serde_json::Value;

/// Three pipelines: the first job reads shared data, then sleeps; the second reads what it wrote.
const WORKFLOW: &str = "volume data cache bafs://home/data 4 MB\n\
    for i in 1..3\n\
    volume work$(i) scratch 4 MB files 10\n\
    job first$(i) {\n\
      executable = /bin/sh\n\
      arguments = -c \"cat /data/one > /scratch/all; sleep 1.5\"\n\
    }\n\
    job second$(i) {\n\
      executable = /bin/sh\n\
      arguments = -c \"cksum < /scratch/all > /scratch/sum\"\n\
    }\n\
    parent first$(i) child second$(i)\n\
    mount data first$(i) /data\n\
    mount work$(i) first$(i) /scratch\n\
    mount work$(i) second$(i) /scratch\n\
    extract work$(i) sum bafs://home/out/$(i)\n\
    end\n";

fn start_cluster(
    name: &str,
    node_sizes: &[&str],
    limit: Option<&str>,
) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start_with_home_rate(node_sizes, limit)?;
    world.wait_for_servers(node_sizes.len() + 1)?;
    world.write_home("data/one", &vec![7; 2_000_000])?;
    Ok(Some(world))
}

fn number_field(value: &Value, name: &str) -> Result<u64> {
    value[name]
        .as_u64()
        .with_context(|| format!("{name} in {value}"))
}

/// The ledger of a run, of which every row must sum to what its job took.
fn read_ledger(world: &TestCluster, journal: &str) -> Result<Value> {
    let report = world.run_json(&["report", journal])?;
    let jobs = report["goodput"]["jobs"].as_array().context("jobs")?;
    ensure!(jobs.len() == 6, "{report}");
    for job in jobs {
        let columns = [
            "computing_ms",
            "io_wait_ms",
            "copying_ms",
            "lost_ms",
            "overhead_ms",
            "queued_ms",
        ];
        let mut sum = 0;
        for column in columns {
            sum += number_field(job, column)?;
        }
        let wall = number_field(job, "wall_ms")?;
        ensure!(sum.abs_diff(wall) * 100 <= wall, "{sum} of {wall}: {job}");
    }
    Ok(report)
}

#[test]
fn cluster_accounts_for_the_time_of_a_run() -> Result<()> {
    let name = "cluster_accounts_for_the_time_of_a_run";
    let Some(world) = start_cluster(name, &["30MB", "30MB"], Some("1MB/s"))? else {
        return Ok(());
    };
    let path = world.write_workflow(WORKFLOW)?;
    let workflow = path.to_string_lossy().into_owned();
    let run = world.run_json(&["run", &workflow])?;
    let report = read_ledger(&world, &workflow)?;
    let wall = number_field(&report["timeline"], "wall_ms")?;
    ensure!(wall == number_field(&run, "wall_ms")?, "{wall}: {run}");
    let jobs = report["goodput"]["jobs"].as_array().context("jobs")?;
    for job in jobs
        .iter()
        .filter(|job| job["job"].as_str().is_some_and(|n| n.starts_with('f')))
    {
        // Each sleeps for 1.5 s, and waits for two megabytes behind a link of one a second.
        ensure!(number_field(job, "computing_ms")? >= 1_400, "{job}");
        ensure!(number_field(job, "io_wait_ms")? >= 500, "{job}");
        ensure!(number_field(job, "lost_ms")? == 0, "{job}");
    }
    let page = path.with_extension("html");
    let output = world
        .bafs_command(&["report", &workflow, "-o", &page.to_string_lossy()])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    let printed = world
        .bafs_command(&["report", &workflow, "-o", "-"])
        .output()?;
    ensure!(printed.status.success(), printed_text(&printed));
    let page = std::fs::read_to_string(page)?;
    ensure!(printed.stdout == page.as_bytes(), printed_text(&printed));
    check_closed_output_is_silent(&world, &workflow)?;
    ensure!(
        page.contains("complete") && page.contains("second3"),
        "{page}"
    );
    let is_told = page.contains(&*world.home.path().to_string_lossy());
    ensure!(!is_told, "a path of this machine is in the page");
    let graph = world
        .bafs_command(&["graph", &format!("{workflow}.journal")])
        .output()?;
    let graph = String::from_utf8(graph.stdout)?;
    ensure!(graph.matches("fillcolor=palegreen").count() == 6, "{graph}");
    let status = world.run_json(&["status", &workflow])?;
    ensure!(
        status["outcome"] == "Complete" && status["is_running"] == false,
        "{status}"
    );
    Ok(())
}

/// Nobody reads what is printed: as after the last line of `head`.
fn check_closed_output_is_silent(world: &TestCluster, workflow: &str) -> Result<()> {
    let all: [&[&str]; 7] = [
        &["replay", workflow],
        &["--json", "replay", workflow],
        &["graph", workflow],
        &["report", workflow, "-o", "-"],
        &["status", workflow],
        &["why", workflow, "second3"],
        &["volume", "list"],
    ];
    for args in all {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let mut command = world.bafs_command(args);
        let output = command.stdout(writer).stderr(Stdio::piped()).spawn()?;
        let output = output.wait_with_output()?;
        ensure!(
            output.stderr.is_empty(),
            "{args:?}: {}",
            printed_text(&output)
        );
        ensure!(
            output.status.code() == Some(141),
            "{args:?}: {}",
            output.status
        );
    }
    Ok(())
}

#[test]
fn cluster_reports_progress_and_cost_of_lost_nodes() -> Result<()> {
    let name = "cluster_reports_progress_and_cost_of_lost_nodes";
    let Some(mut world) = start_cluster(name, &["30MB", "30MB", "30MB"], None)? else {
        return Ok(());
    };
    let path = world.write_workflow(&WORKFLOW.replace("sleep 1.5", "sleep 4"))?;
    let workflow = path.to_string_lossy().into_owned();
    let mut command = world.bafs_command(&["run", &workflow, "--json"]);
    let run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let mut victim = None;
    for _ in 0..200 {
        std::thread::sleep(Duration::from_millis(100));
        if !path.with_extension("bafs.journal").exists() {
            continue;
        }
        let status = world.run_json(&["status", &workflow])?;
        let running = status["running_executions"].as_array().context("running")?;
        if status["is_running"] == true && running.len() == 3 {
            victim = running[0]["node"].as_str().map(str::to_owned);
            break;
        }
    }
    let victim = victim.context("three jobs were not seen to run")?;
    world.cluster.kill(&victim)?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    let report = read_ledger(&world, &workflow)?;
    let executions = report["timeline"]["executions"]
        .as_array()
        .context("executions")?;
    let mut executions = executions.iter();
    let is_lost = executions.any(|e| e["node"] == *victim && e["outcome"] == "abandoned");
    ensure!(is_lost, "{report}");
    // It had run for some time when its node was killed, and was missed only later.
    ensure!(
        number_field(&report["goodput"]["total"], "lost_ms")? >= 1_000,
        "{report}"
    );
    let warned = report["warnings"].as_array().context("warnings")?;
    let names_node = warned.iter().any(|w| {
        w.as_str()
            .is_some_and(|w| w.contains(&format!("node {victim}")))
    });
    ensure!(names_node, "{report}");
    Ok(())
}

/// A cache of just the size of its source, whose files are no whole pieces of 4096 bytes: each of
/// three jobs that read all in the same order finds nothing of it.
#[test]
fn cluster_reports_a_too_small_cache() -> Result<()> {
    let name = "cluster_reports_a_too_small_cache";
    let Some(world) = start_cluster(name, &["30MB"], None)? else {
        return Ok(());
    };
    const FILES: usize = 60;
    const FILE_BYTES: usize = 65_537;
    for file in 0..FILES {
        world.write_home(&format!("many/{file:02}"), &vec![9; FILE_BYTES])?;
    }
    let mut text = format!(
        "volume many cache bafs://home/many {} B\n",
        FILES * FILE_BYTES
    );
    for job in 0..3 {
        text += &format!(
            "job read{job} {{\n  executable = /bin/sh\n  arguments = -c \"cat /data/* | \
             cksum\"\n}}\nmount many read{job} /data\n"
        );
    }
    text += "parent read0 child read1\nparent read1 child read2\n";
    let workflow = world.write_workflow(&text)?.to_string_lossy().into_owned();
    world.run_json(&["run", &workflow])?;
    let report = world.run_json(&["report", &workflow])?;
    let warned = report["warnings"].as_array().context("warnings")?;
    let names_cache = warned.iter().any(|warning| {
        let said = warning.as_str().unwrap_or_default();
        said.contains("of volume 'many' crossed the home link again")
    });
    ensure!(names_cache, "{report}");
    Ok(())
}

#[test]
fn cluster_resimulates_a_finished_run() -> Result<()> {
    let name = "cluster_resimulates_a_finished_run";
    let Some(world) = start_cluster(name, &["30MB", "30MB"], Some("1MB/s"))? else {
        return Ok(());
    };
    let path = world.write_workflow(WORKFLOW)?;
    let workflow = path.to_string_lossy().into_owned();
    let run = world.run_json(&["run", &workflow])?;
    let real_s = number_field(&run, "wall_ms")? as f64 / 1_000.0;
    let simulated = |home: &str| -> Result<(f64, u64)> {
        let rates = ["--home-rate", home, "--local-rate", "500MB/s"];
        let found = [&["sim", "--from-journal", &workflow][..], &rates].concat();
        let found = world.run_json(&found)?;
        ensure!(
            found["measured_run"]["duration_s"].as_f64().is_some(),
            "{found}"
        );
        let row = &found["runs"][0];
        let seconds = row["simulated_s"].as_f64().context("simulated_s")?;
        Ok((seconds, number_field(row, "fetched_bytes")?))
    };
    let (as_it_was, fetched) = simulated("1MB/s")?;
    // Two megabytes behind a link of one a second, then a sleep of 1.5 s; real jobs have to be
    // started besides.
    ensure!(
        as_it_was > 3.0 && as_it_was < real_s + 0.5,
        "{as_it_was} s, really {real_s} s"
    );
    ensure!(fetched.abs_diff(2_000_000) < 10_000, "{fetched}");
    let (faster, _) = simulated("100MB/s")?;
    ensure!(faster + 1.5 < as_it_was, "{faster} s, before {as_it_was} s");
    let strategies = world.run_json(&[
        "sim",
        "--from-journal",
        &workflow,
        "--home-rate",
        "1MB/s",
        "--local-rate",
        "500MB/s",
        "--all",
        "--nodes",
        "3",
        "--checkpoint",
        "always",
    ])?;
    let rows = strategies["runs"].as_array().context("runs")?;
    ensure!(
        rows.len() > 2 && rows[0]["policy"] == "need",
        "{strategies}"
    );
    // A run that was cut short tells only a part.
    let journal = std::fs::read(format!("{workflow}.journal"))?;
    let part = path.with_extension("part");
    std::fs::write(&part, &journal[..journal.len() * 3 / 4])?;
    let cut = world
        .bafs_command(&["sim", "--from-journal", &part.to_string_lossy()])
        .output()?;
    let error = String::from_utf8_lossy(&cut.stderr);
    ensure!(
        !cut.status.success() && error.contains("has not ended"),
        "{error}"
    );
    Ok(())
}
