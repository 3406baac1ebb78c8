//! Many runs of several users over few data sets: what home sends in all, and what the rights of a
//! user keep from another.

use std::os::unix::fs::symlink;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::super::{BenchmarkReport, Options};
use super::test_queue::{TestQueue, TestUser};
use crate::content::Content;

const USERS: usize = 8;
const SETS: usize = 3;
const SET_BYTES: usize = 2_000_000;

/// Runs that are handed in before the next ones wait for them.
const BATCH: usize = 8;

/// The service is killed each time after so many batches, and a node after twice as many.
const BATCHES_PER_KILL: usize = 4;

/// Hands in runs of all users, with restarts, and one eviction by force. Bytes from home over those
/// of the data sets.
pub(super) fn measure_month(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let runs = options.choose(200, 32);
    report.print_section(&format!(
        "{runs} runs of {USERS} users over {SETS} data sets, with restarts"
    ));
    let mut queue = TestQueue::start(&["200MB", "200MB"])?;
    for set in 0..SETS {
        let content = Content::new(set as u64, SET_BYTES);
        queue
            .world
            .write_home(&format!("set{set}/data"), content.bytes())?;
    }
    let users = (0..USERS)
        .map(|user| queue.add_user(&format!("user{user}")))
        .collect::<Result<Vec<_>>>()?;
    let first = queue.home_bytes()?;
    let mut evicted_bytes = 0;
    let numbers: Vec<usize> = (0..runs).collect();
    for (batch, numbers) in numbers.chunks(BATCH).enumerate() {
        let submit = |number: &usize| submit_reader(&queue, &users, *number);
        let ids = numbers.iter().map(submit).collect::<Result<Vec<_>>>()?;
        if batch % BATCHES_PER_KILL == 1 {
            queue.kill()?;
            queue.start_process()?;
        }
        queue.wait_until_over(&ids)?;
        if batch % (2 * BATCHES_PER_KILL) == 2 {
            let node = ["n1", "n2"][batch / (2 * BATCHES_PER_KILL) % 2];
            queue.world.cluster.kill(node)?;
            queue.world.cluster.restart(node)?;
            queue.world.wait_for_servers(3)?;
        }
        if batch == runs / BATCH / 2 {
            evicted_bytes += evict_all(&queue, &users, runs)?;
        }
    }
    let sent = queue.home_bytes()? - first - evicted_bytes;
    let ratio = sent as f64 / (SETS * SET_BYTES) as f64;
    report.add_figure_with_target("month_home_ratio", ratio, 0.999..=1.001);
    report.add_figure("month_runs", runs as f64);
    let evicted = evicted_bytes as f64 / (SETS * SET_BYTES) as f64;
    report.add_figure("month_evicted_ratio", evicted);
    Ok(())
}

fn submit_reader(queue: &TestQueue, users: &[TestUser], number: usize) -> Result<u64> {
    // All pairs of a user and a data set come up.
    let set = (number / USERS + number) % SETS;
    let text = format!(
        "volume in cache bafs://home/set{set} 8 MB\nfor i in 1..2\njob a$(i) {{\n\
         executable = /bin/sh\narguments = -c \"cat /in/data > /dev/null\"\n}}\n\
         mount in a$(i) /in\nend\n"
    );
    queue.submit_text(&users[number % USERS], &format!("r{number}.bafs"), &text)
}

/// A run reserves nearly all space, and each data set is read once more. Bytes from home for that.
fn evict_all(queue: &TestQueue, users: &[TestUser], number: usize) -> Result<u64> {
    let before = queue.home_bytes()?;
    let mut text = String::new();
    for job in ["a", "b"] {
        text += &format!(
            "volume w{job} scratch 185 MB\njob {job} {{\nexecutable = /bin/sh\n\
             arguments = -c \"echo > /w/x; sleep 1\"\n}}\nmount w{job} {job} /w\n"
        );
    }
    let greedy = queue.submit_text(&users[0], "greedy.bafs", &text)?;
    queue.wait_until_over(&[greedy])?;
    let mut ids = Vec::new();
    for set in 0..SETS {
        ids.push(submit_reader(queue, users, number + set * (USERS + 1))?);
    }
    queue.wait_until_over(&ids)?;
    Ok(queue.home_bytes()? - before)
}

/// Attempts of a user to read what only another user may, while it is in the caches of the nodes.
pub(super) fn measure_rights(report: &mut BenchmarkReport) -> Result<()> {
    const SECRET: &str = "nobody else reads this\n";
    report.print_section("reads of a user who has no right to the data");
    let queue = TestQueue::start(&["100MB"])?;
    let world = &queue.world;
    world.write_home("alice/set/data", SECRET.as_bytes())?;
    world.write_home("eve/own", b"own")?;
    symlink("../alice/set", world.home.path().join("eve/link"))?;
    let alice = queue.add_user_with("alice", &["--home", "alice"])?;
    let eve = queue.add_user_with("eve", &["--home", "eve"])?;
    let reader = |url: &str, result: &str| {
        format!(
            "volume in cache {url} 8 MB\nvolume out scratch 1 MB\njob a {{\n\
             executable = /bin/sh\narguments = -c \"cat /in/data > /out/copy\"\n}}\n\
             mount in a /in\nmount out a /out\nextract out copy bafs://home/{result}\n"
        )
    };
    let own = reader("bafs://home/alice/set", "alice/copy");
    let first = queue.submit_text(&alice, "own.bafs", &own)?;
    queue.wait_until_over(&[first])?;
    ensure!(world.read_home("alice/copy")? == SECRET.as_bytes());

    let home = world.cluster.home_address();
    let urls = [
        "bafs://home/alice/set".to_owned(),
        "bafs://home/eve/../alice/set".to_owned(),
        "bafs://home/eve/link".to_owned(),
        format!("bafs://{home}/alice/set"),
        format!("file://{}/alice/set", world.home.path().display()),
    ];
    let mut reads = 0;
    let mut accepted = Vec::new();
    for (number, url) in urls.iter().enumerate() {
        let text = reader(url, &format!("eve/copy{number}"));
        // That it is refused at once is the usual case.
        if let Ok(id) = queue.submit_text(&eve, &format!("e{number}.bafs"), &text) {
            accepted.push(id);
        }
    }
    queue.wait_for_ends(&accepted, Duration::from_secs(60))?;
    for number in 0..urls.len() {
        let copy = world.read_home(&format!("eve/copy{number}"));
        reads += usize::from(copy.is_ok_and(|copy| copy == SECRET.as_bytes()));
    }
    // With her own identity, and with that of the processes of her runs.
    let run_identity = queue.run_identity("eve")?;
    for identity in [eve.identity().to_owned(), run_identity] {
        let identity = identity.to_str().context("a path is text")?;
        let words = [
            "volume", "create", "stolen", "--node", "n1", "--size", "8MB",
        ];
        let mut command = world.bafs_command(&words);
        command.args(["--cache", "bafs://home/alice/set", "--identity", identity]);
        reads += usize::from(command.output()?.status.success());
    }
    report.add_figure_with_target("unauthorised_reads", reads as f64, 0.0..=0.0);
    report.add_figure("unauthorised_attempts", (urls.len() + 2) as f64);
    Ok(())
}
