//! Many small files created on a remote volume: with the agent's delegation, and with each
//! operation answered by the server before the program continues.

use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::identity::Identity;
use bafs_proto::limits::OP_DEADLINE_MS_DEFAULT;
use bafs_proto::message::{
    JobCommand, JobOutcome, JobReport, JobSpec, MountSpec, MountTarget, Role,
};

use super::delayed_link::DelayedLink;
use super::file_work::{FileWork, parse_rate, process_arguments};
use super::mounted_scratch::start_remote_cluster;
use crate::TestCluster;
use crate::bench::measure::{BenchmarkVariant, run_interleaved, table_row};
use crate::bench::{BenchmarkReport, Options};

/// One way of the link takes so long.
const LINK_DELAY: Duration = Duration::from_millis(1);

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let files = options.choose(20_000, 2_000);
    // Without delegation every file takes some round trips: fewer files suffice to measure the
    // rate.
    let fewer = options.choose(1_000, 200);
    let world = start_remote_cluster("2GB")?;
    let link = DelayedLink::start(world.cluster.address("n1"), LINK_DELAY)?;
    report.print_section(&format!(
        "{files} files of 4 KiB behind a link of {} ms each way: files/s",
        LINK_DELAY.as_millis()
    ));
    let mut serial = 0;
    let mut storm = |files, delegated| {
        serial += 1;
        measure_storm(&world, &link.address, files, delegated, serial)
    };
    let storm = std::cell::RefCell::new(&mut storm);
    let mut ways = [
        BenchmarkVariant::new("each operation waits", || storm.borrow_mut()(fewer, false)),
        BenchmarkVariant::new("delegated", || storm.borrow_mut()(files, true)),
    ];
    let samples = run_interleaved(options.choose(5, 2), &mut ways)?;
    let mut rows = vec![table_row(["way", "files/s", "gain"])];
    for (way, rate) in ways.iter().zip(&samples) {
        let gain = rate.ratio_to(&samples[0]);
        rows.push(table_row([way.name, &rate.to_string(), &gain.to_string()]));
    }
    report.print_table(&rows);
    report.add_samples("delegation_gain", &samples[1].ratio_to(&samples[0]));
    Ok(())
}

/// Files per second of a job, from its start of making them until all are at the server.
fn measure_storm(
    world: &TestCluster,
    server: &str,
    files: u64,
    delegated: bool,
    serial: u32,
) -> Result<f64> {
    let identity = world.cluster.identity();
    let token = Identity::load(&identity.join("scheduler"), Role::Scheduler)?.token;
    let volume = world.run_json(&["volume", "show", "work"])?["id"]
        .as_str()
        .context("a volume has an id")?
        .parse()?;
    let directory = format!("/scratch/{serial}");
    let own = std::env::current_exe()?;
    let own = own.to_str().context("the path of this program is text")?;
    let work = |work| process_arguments(work, &directory, files).join(" ");
    let script = format!(
        "mkdir {directory} && {own} {} && {own} {} >/dev/null",
        work(FileWork::Create),
        work(FileWork::Unlink)
    );
    let mount = MountSpec {
        name: "work".to_owned(),
        path: "/scratch".to_owned(),
        target: MountTarget::Scratch {
            server: server.to_owned(),
            volume,
        },
        writable: true,
        write_back: false,
        token,
        lifetime_ms_min: 0,
    };
    let job = JobSpec {
        name: "storm".to_owned(),
        command: JobCommand {
            executable: "/bin/sh".to_owned(),
            arguments: vec!["-c".to_owned(), script],
            environment: std::env::vars()
                .filter(|(name, _)| name == "PATH")
                .collect(),
            directory: "/".to_owned(),
            stdout: None,
            stderr: None,
            shared_directories: Vec::new(),
            required_files: Vec::new(),
            produced_files: Vec::new(),
        },
        mounts: vec![mount],
        op_deadline_ms: OP_DEADLINE_MS_DEFAULT,
    };
    let report = run_job(world, &job, delegated)?;
    ensure!(
        report.outcome == JobOutcome::Exited(0),
        "{:?}: {}",
        report.outcome,
        report.output_tail
    );
    parse_rate(FileWork::Create, files, &report.output_tail)
}

/// Runs a job under an agent of its own.
fn run_job(world: &TestCluster, job: &JobSpec, delegated: bool) -> Result<JobReport> {
    let mut command = Command::new(crate::bafs_program());
    command
        .arg("agent")
        .arg("--identity")
        .arg(world.cluster.identity().join("agent"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    command.env("BAFS_DELEGATE", delegated.to_string());
    let mut agent = command.spawn()?;
    let mut input = agent.stdin.take().context("standard input is piped")?;
    serde_json::to_writer(&mut input, job)?;
    input.write_all(b"\n")?;
    let output = agent.wait_with_output();
    drop(input);
    let output = output?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = said.lines().rfind(|line| !line.is_empty());
    Ok(serde_json::from_str(
        line.context("the agent did not report")?,
    )?)
}
