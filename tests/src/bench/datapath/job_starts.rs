//! How long jobs take that do nothing: `bafs exec` with one volume and with six, the same through
//! the scheduler, and how many small volumes a node holds.

use std::fmt::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Result, ensure};

use super::mounted_scratch::start_local_cluster;
use crate::bench::measure::{BenchmarkVariant, run_interleaved, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};
use crate::{TestCluster, printed_text};

/// Volumes of one job.
const VOLUMES: usize = 6;

/// Milliseconds per second.
const MS: f64 = 1e3;

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    run_exec(options, report)?;
    run_jobs(options, report)?;
    run_small_volumes(options, report)
}

/// Ways to start a program that does nothing: milliseconds from start to end.
fn run_exec(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let world = start_local_cluster("16GB", &["--limit", "exact"], "1GB")?;
    let create = ["volume", "create", "--node", "n1", "--size"];
    for number in 1..=VOLUMES {
        let (large, small) = (format!("large{number}"), format!("small{number}"));
        world.run_json(&[&create[..], &["1GB", &large, "--files", "50000"]].concat())?;
        world.run_json(&[&create[..], &["20MB", &small]].concat())?;
    }
    report.print_section("a program that does nothing, in a job: milliseconds");
    let exec = |kind: &str, count: usize| {
        let mounts = (1..=count).map(|number| format!("{kind}{number}:/mnt/{kind}{number}"));
        let mounts: Vec<String> = mounts.collect();
        let mut args = vec!["exec"];
        for mount in &mounts {
            args.extend(["--mount", mount]);
        }
        args.extend(["--", "/bin/true"]);
        measure_run(&mut world.bafs_command(&args))
    };
    let mut ways = [
        BenchmarkVariant::new("exec, 1 volume", || exec("large", 1)),
        BenchmarkVariant::new("exec, 6 volumes", || exec("large", VOLUMES)),
        BenchmarkVariant::new("exec, 1 exact volume", || exec("small", 1)),
        BenchmarkVariant::new("exec, 6 exact volumes", || exec("small", VOLUMES)),
        BenchmarkVariant::new("unshare", || {
            let mut command = Command::new("unshare");
            measure_run(command.args(["--mount", "--pid", "--fork", "/bin/true"]))
        }),
    ];
    let rounds = options.choose(41, 5);
    let found = run_interleaved(rounds, &mut ways)?;
    let mut rows = vec![table_row(["way", "ms"])];
    for (way, ms) in ways.iter().zip(&found) {
        rows.push(table_row([way.name, &ms.to_string()]));
    }
    report.print_table(&rows);
    let figures = [
        "exec_ms_1",
        "exec_ms_6",
        "exec_exact_ms_1",
        "exec_exact_ms_6",
        "unshare_ms",
    ];
    for (figure, ms) in figures.into_iter().zip(&found) {
        report.add_samples(figure, ms);
    }
    Ok(())
}

fn measure_run(command: &mut Command) -> Result<f64> {
    let command = command.stdin(Stdio::null());
    let (took, output) = time_seconds(|| Ok(command.output()?))?;
    ensure!(output.status.success(), printed_text(&output));
    Ok(took * MS)
}

/// Jobs per second of one run, on a node with a slot for each processor.
fn run_jobs(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let jobs = options.choose(500, 50);
    let world = TestCluster::start(&["10GB"])?;
    world.wait_for_servers(2)?;
    let mut text = String::new();
    for number in 0..jobs {
        write!(text, "job j{number} {{\nexecutable = /bin/true\n}}\n")?;
    }
    let path = world.cluster.directory().join("true.bafs");
    std::fs::write(&path, text)?;
    let run = || {
        let mut command = world.bafs_command(&["run"]);
        let journal = world.cluster.directory().join("true.journal");
        let _ = std::fs::remove_file(&journal);
        let (took, output) =
            time_seconds(|| Ok(command.arg(&path).arg("--journal").arg(&journal).output()?))?;
        ensure!(output.status.success(), printed_text(&output));
        Ok(jobs as f64 / took)
    };
    let mut ways = [BenchmarkVariant::new("jobs", run)];
    let found = run_interleaved(options.choose(5, 2), &mut ways)?;
    report.print_line(&format!("{jobs} jobs of /bin/true: {} jobs/s", found[0]));
    report.add_samples("jobs_per_s", &found[0]);
    Ok(())
}

/// How many volumes of 1 MB a node of 10 GB holds, up to 1,000.
fn run_small_volumes(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let wanted = options.choose(1_000, 100);
    let world = TestCluster::start(&["10GB"])?;
    world.wait_for_servers(2)?;
    let mut made = 0;
    for number in 0..wanted {
        let name = format!("v{number}");
        let create = ["volume", "create", &name, "--node", "n1", "--size", "1MB"];
        if world
            .run_json(&[&create[..], &["--files", "128"]].concat())
            .is_err()
        {
            break;
        }
        made += 1;
    }
    report.add_figure("small_volumes", made as f64);
    Ok(())
}
