//! `bench service`: a queue of 10,000 workflows of 100 users, handed in over the network while the
//! service is killed, and runs while it is killed; users who share data sets for a month; a node
//! that lies to others; the tests of the page. Criteria: a submission takes 50 ms at most, the
//! service 2 GiB, nothing that was confirmed is lost or there twice, home sends each shared byte
//! once, and nobody reads wrong bytes or what he has no right to.

mod integrity;
mod lying_node;
mod shared_use;
mod test_queue;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result, ensure};

use self::test_queue::TestQueue;
use super::measure::{Samples, Stopwatch};
use super::page::measure_page;
use super::{BenchmarkReport, Options};
use crate::{bafs_program, mount_obstacle};

const SUMMARY: &[&str] = &[
    "second_run_home_ratio",
    "two_users_home_ratio",
    "month_home_ratio",
    "unauthorised_reads",
    "poisoned_reads",
    "manifest_digest_cost",
    "submit_ms",
    "submit_ms_p99",
    "queued",
    "restart_lost",
    "restart_doubled",
    "restart_s",
    "list_ms",
    "peak_gib",
    "page_tests",
    "page_failures",
    "api_fuzz_failures",
    "wheel_mb",
];

/// Wheels have at most so many megabytes.
const WHEEL_MB_MAX: f64 = 40.0;

const USERS: usize = 100;

/// The service is killed after each such part of all submissions.
const KILLS: usize = 4;

/// Workflows that run while the service is killed, and their jobs.
const RUNS: usize = 6;
const JOBS: usize = 4;

/// Runs it.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    let (mut lost, mut doubled) = (0, 0);
    if options.is_part_selected("queue") {
        let (queue_lost, queue_doubled) = measure_queue(options, report)?;
        lost += queue_lost;
        doubled += queue_doubled;
    }
    if options.is_part_selected("runs") {
        match mount_obstacle() {
            Some(why) => report.add_missing("runs", &why),
            None => {
                let (runs_lost, runs_doubled) = measure_runs(report)?;
                lost += runs_lost;
                doubled += runs_doubled;
                measure_home_traffic(report)?;
            }
        }
    }
    if options.is_part_selected("integrity") {
        integrity::measure_poisoning(report)?;
        integrity::measure_cost(options, report)?;
    }
    if options.is_part_selected("month") {
        match mount_obstacle() {
            Some(why) => report.add_missing("month", &why),
            None => {
                shared_use::measure_rights(report)?;
                shared_use::measure_month(options, report)?;
            }
        }
    }
    if options.is_part_selected("page") {
        measure_page_and_wheel(report)?;
    }
    report.add_figure_with_target("restart_lost", lost as f64, 0.0..=0.0);
    report.add_figure_with_target("restart_doubled", doubled as f64, 0.0..=0.0);
    Ok(())
}

/// What the tests of the page and of the API say, and the size of the wheel.
fn measure_page_and_wheel(report: &mut BenchmarkReport) -> Result<()> {
    report.print_section("tests of the page and of the API; the wheel");
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    match measure_page(&checkout, &bafs_program())? {
        Some(figures) => {
            report.add_figure("page_tests", figures.page_tests as f64);
            report.add_figure_with_target("page_failures", figures.page_failures as f64, 0.0..=0.0);
            match figures.api_fuzz_failures {
                Some(count) => {
                    report.add_figure_with_target("api_fuzz_failures", count as f64, 0.0..=0.0);
                }
                None => report.add_missing("api_fuzz_failures", "the fuzzer did not run"),
            }
        }
        None => report.add_missing("page_tests", "they cannot run here; see above"),
    }
    let wheels = find_wheels(&checkout.join("target/dist"))?;
    match wheels.into_iter().max() {
        Some((_, bytes)) => {
            let megabytes = bytes as f64 / 1e6;
            report.add_figure_with_target("wheel_mb", megabytes, 0.0..=WHEEL_MB_MAX);
        }
        None => report.add_missing("wheel_mb", "`cargo xtask dist` has made no wheel"),
    }
    Ok(())
}

/// When each wheel of a directory was made, and its size in bytes.
fn find_wheels(directory: &Path) -> Result<Vec<(SystemTime, u64)>> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let mut wheels = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.path().extension().is_some_and(|it| it == "whl") {
            let found = entry.metadata()?;
            wheels.push((found.modified()?, found.len()));
        }
    }
    Ok(wheels)
}

/// Hands in workflows to a cluster without nodes. Confirmed ones that are lost, and names that are
/// there twice.
fn measure_queue(options: &Options, report: &mut BenchmarkReport) -> Result<(usize, usize)> {
    let count = options.choose(10_000, 1_000);
    report.print_section(&format!("{count} workflows of {USERS} users"));
    let mut queue = TestQueue::start(&[])?;
    let users = (0..USERS)
        .map(|user| queue.add_user(&format!("user{user}")))
        .collect::<Result<Vec<_>>>()?;
    let mut times_ms = Vec::with_capacity(count);
    let mut restarts_s = Vec::new();
    let mut confirmed: BTreeMap<u64, String> = BTreeMap::new();
    for number in 0..count {
        let name = format!("w{number}.bafs");
        let watch = Stopwatch::start();
        let id = queue.submit(&users[number % USERS], &name)?;
        times_ms.push(watch.elapsed().as_secs_f64() * 1e3);
        confirmed.insert(id, name);
        if (number + 1) % (count / KILLS) == 0 {
            // A submission is under way.
            let unheard = format!("u{number}.bafs");
            queue.submit_without_answer(
                &users[0],
                &unheard,
                Duration::from_millis(number as u64 % 7),
            );
            queue.kill()?;
            let watch = Stopwatch::start();
            queue.start_process()?;
            restarts_s.push(watch.elapsed().as_secs_f64());
        }
    }
    let watch = Stopwatch::start();
    let listed = queue.list()?;
    report.add_figure("list_ms", watch.elapsed().as_secs_f64() * 1e3);
    let lost = confirmed
        .iter()
        .filter(|(id, name)| listed.get(id) != Some(name));
    let lost = lost.count();
    let mut names: Vec<&String> = listed.values().collect();
    names.sort_unstable();
    let doubled = names.windows(2).filter(|pair| pair[0] == pair[1]).count();
    times_ms.sort_by(f64::total_cmp);
    let p99 = times_ms[times_ms.len() * 99 / 100];
    let samples = Samples::new(times_ms);
    report.add_samples("submit_ms", &samples);
    report.add_figure_with_target("submit_ms_p99", p99, 0.0..=50.0);
    report.add_figure("queued", listed.len() as f64);
    report.add_samples("restart_s", &Samples::new(restarts_s));
    let peak_gib = queue.peak_bytes()? as f64 / (1u64 << 30) as f64;
    report.add_figure_with_target("peak_gib", peak_gib, 0.0..=2.0);
    Ok((lost, doubled))
}

/// Runs workflows while the service is killed. Jobs that did not run, and that ran twice.
fn measure_runs(report: &mut BenchmarkReport) -> Result<(usize, usize)> {
    report.print_section(&format!(
        "{RUNS} runs of {JOBS} jobs, the service killed meanwhile"
    ));
    let mut queue = TestQueue::start(&["200MB", "200MB"])?;
    let user = queue.add_user("alice")?;
    let log = queue.world.home.path().join("log");
    let mut ids = Vec::new();
    for run in 0..RUNS {
        let text = format!(
            "for i in 1..{JOBS}\nvolume x$(i) scratch 1 MB\njob a$(i) {{\n\
             executable = /bin/sh\narguments = -c \"echo {run}-$(i) >> {}; sleep 0.5\"\n}}\n\
             mount x$(i) a$(i) /x\nend\n",
            log.display()
        );
        ids.push(queue.submit_text(&user, &format!("r{run}.bafs"), &text)?);
        if run % 2 == 1 {
            std::thread::sleep(Duration::from_millis(400));
            queue.kill()?;
            queue.start_process()?;
        }
    }
    queue.wait_until_over(&ids)?;
    let text = String::from_utf8(queue.world.read_home("log")?)?;
    let mut ran: BTreeMap<&str, usize> = BTreeMap::new();
    for line in text.lines() {
        *ran.entry(line).or_default() += 1;
    }
    let lost = RUNS * JOBS - ran.len();
    let doubled = ran.values().filter(|count| **count > 1).count();
    Ok((lost, doubled))
}

/// Bytes from home over bytes of the data set: of a second run, and of two users at once.
fn measure_home_traffic(report: &mut BenchmarkReport) -> Result<()> {
    const DATA_BYTES: usize = 6_000_000;
    report.print_section("bytes from home, of a data set of 6 MB");
    let queue = TestQueue::start(&["100MB", "100MB"])?;
    queue.world.write_home("data/set", &vec![5; DATA_BYTES])?;
    let users = [queue.add_user("alice")?, queue.add_user("bob")?];
    let text = "volume in cache bafs://home/data 40 MB\nfor i in 1..4\njob a$(i) {\n\
        executable = /bin/sh\narguments = -c \"cat /in/set > /dev/null\"\n}\n\
        mount in a$(i) /in\nend\n";
    let both = [
        queue.submit_text(&users[0], "a.bafs", text)?,
        queue.submit_text(&users[1], "b.bafs", text)?,
    ];
    queue.wait_until_over(&both)?;
    let first = queue.home_bytes()?;
    let again = [queue.submit_text(&users[0], "c.bafs", text)?];
    queue.wait_until_over(&again)?;
    let second = queue.home_bytes()?;
    ensure!(first > 0, "nothing was read from home");
    report.add_figure("two_users_home_ratio", first as f64 / DATA_BYTES as f64);
    let more = second.checked_sub(first).context("counters only grow")?;
    report.add_figure("second_run_home_ratio", more as f64 / DATA_BYTES as f64);
    Ok(())
}
