//! Runs that failed, or did everything twice, through no fault of their own.

use std::collections::BTreeMap;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_sched::Event;
use bafs_sched::io::journal;

use super::user_directory::{UserDirectory, last_lines, wait_or_kill};
use crate::fault_injection::read_executions;
use crate::small_disk::{fill_disk, path_in_namespace, start_node_on_disk};
use crate::{TestCluster, bafs_program, printed_text};

/// Duration of a run that continues beside others.
const RUN_TIMEOUT: Duration = Duration::from_secs(90);

/// Undeclared sizes are assumed. Beside a user who fills the nodes, the assumed sizes must not be
/// so small that the run fails.
pub(super) fn check_unknown_sizes_beside_another_user() -> Result<()> {
    let world = TestCluster::start(&["700MB", "700MB"])?;
    world.wait_for_servers(3)?;
    let full = "for i in 1..2\nvolume w$(i) scratch 685 MB\njob h$(i) {\nexecutable = sh\n\
        arguments = -c 'sleep 12; echo done > /w/x'\n}\nmount w$(i) h$(i) /w\nend\n";
    let unknown = "for i in 1..2\nvolume u$(i) scratch unknown\njob k$(i) {\nexecutable = sh\n\
        arguments = -c 'head -c 20000000 /dev/zero > /u/x'\n}\nmount u$(i) k$(i) /u\nend\n";
    let start = |user: &str, text: &str| -> Result<_> {
        let path = world.home.path().join(format!("{user}.bafs"));
        std::fs::write(&path, text)?;
        let mut command = world.bafs_command(&["run", "--user", user]);
        command.arg(&path).process_group(0);
        command.stdout(Stdio::null()).stderr(std::fs::File::create(
            world.home.path().join(format!("{user}.told")),
        )?);
        Ok(command.spawn()?)
    };
    let mut bob = start("bob", full)?;
    std::thread::sleep(Duration::from_secs(4));
    let mut alice = start("alice", unknown)?;
    let ended = wait_or_kill(&mut alice, RUN_TIMEOUT)?;
    let bob = wait_or_kill(&mut bob, RUN_TIMEOUT)?;
    let told = world.read_home("alice.told")?;
    let told = last_lines(&String::from_utf8_lossy(&told));
    ensure!(
        ended == Some(Some(0)),
        "the second user's run ends with {ended:?}: {told}"
    );
    ensure!(
        bob == Some(Some(0)),
        "the first user's run ends with {bob:?}"
    );
    Ok(())
}

/// A job gathers volumes of unknown size that fit easily: everything runs once, except the measured
/// jobs.
pub(super) fn check_gathered_unknown_sizes() -> Result<()> {
    let directory = UserDirectory::new()?;
    let text = "job all {\nexecutable = sh\narguments = -c 'ls /in/*/x | wc -l > /out/list'\n}\n\
        volume out scratch 1 MB\nmount out all /out\nextract out list bafs://home/list\n\
        for i in 1..12\nvolume w$(i) scratch unknown\njob s$(i) {\nexecutable = sh\n\
        arguments = -c 'head -c 45000000 /dev/zero > /w/x'\n}\nmount w$(i) s$(i) /w\n\
        mount w$(i) all /in/$(i) ro\nparent s$(i) child all\nend\n";
    let ended = directory.run_workflow(text, &["--local", "4", "--node-size", "1GB"])?;
    ended.check_code(0)?;
    ensure!(
        directory.read_file("list") == "12",
        "the list has {}",
        directory.read_file("list")
    );
    let again = count_reruns(&directory.path("journal"))?;
    ensure!(
        again.values().sum::<usize>() <= 1,
        "run more than once: {again:?}"
    );
    Ok(())
}

/// Jobs that ran more than once, and how much more often.
fn count_reruns(path: &Path) -> Result<BTreeMap<String, usize>> {
    let all = read_executions(path)?;
    let mut count = BTreeMap::new();
    for one in all.iter().filter(|one| one.has_begun) {
        *count.entry(one.name.clone()).or_insert(0) += 1;
    }
    count.retain(|_, times| *times > 1);
    Ok(count
        .into_iter()
        .map(|(name, times)| (name, times - 1))
        .collect())
}

/// A full disk below a volume that no agent watches is no fault of the job: it runs again.
pub(super) fn check_full_disk_below_watched_volume() -> Result<()> {
    let world = TestCluster::start(&[])?;
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = start_node_on_disk("-t tmpfs -o size=600m tmpfs", &world, &store)?;
    world.wait_for_servers(2)?;
    let text = "volume w scratch 16 MB watched\njob j {\nexecutable = sh\n\
        arguments = -c 'sleep 4; head -c 2000000 /dev/zero > /w/x'\n}\nmount w j /w\n\
        extract w x bafs://home/x\n";
    let path = world.write_workflow(text)?;
    let mut command = world.bafs_command(&["run"]);
    command.arg(&path).process_group(0);
    let told = world.home.path().join("told");
    command
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&told)?);
    let mut run = command.spawn()?;
    std::thread::sleep(Duration::from_secs(2));
    let filler = path_in_namespace(&node, &store).join("filler");
    fill_disk(&filler)?;
    std::thread::sleep(Duration::from_secs(6));
    std::fs::remove_file(&filler)?;
    let ended = wait_or_kill(&mut run, RUN_TIMEOUT)?;
    drop(node.stdin.take());
    node.wait()?;
    let told = last_lines(&std::fs::read_to_string(&told)?);
    ensure!(
        ended == Some(Some(0)),
        "the run ends with {ended:?}: {told}"
    );
    ensure!(
        world.read_home("x")?.len() == 2_000_000,
        "the result is wrong"
    );
    Ok(())
}

/// A gathering job that needs more space than can exist is reported before the first job runs.
pub(super) fn check_impossible_gathering_job() -> Result<()> {
    let text = |count: u32, size: &str| {
        format!(
            "for i in 1..{count}\nvolume v$(i) scratch {size}\njob m$(i) {{\nexecutable = sh\n\
             arguments = -c 'echo x > /o/x'\n}}\nmount v$(i) m$(i) /o\n\
             mount v$(i) sum /in/$(i) ro\nparent m$(i) child sum\nend\n\
             job sum {{\nexecutable = sh\narguments = -c 'cat /in/*/x | wc -l'\n}}\n"
        )
    };
    let directory = UserDirectory::new()?;
    directory.write_file("many.bafs", &text(1_100, "64 KB files 4"))?;
    let many = directory.run_bafs(&["check", "many.bafs"])?;
    many.check_code(1).context("1,100 volumes of one job")?;
    let large =
        directory.run_workflow(&text(40, "30 MB"), &["--local", "1", "--node-size", "1GB"])?;
    large
        .check_code(1)
        .context("a job that needs more than all nodes have")?;
    let steps = journal::read_history(&directory.path("journal"))?.steps;
    let is_start = |event: &Event| matches!(event, Event::JobStarted { .. });
    let started = steps.iter().filter(|step| is_start(&step.event)).count();
    ensure!(
        started == 0,
        "{started} jobs ran before the run was given up"
    );
    Ok(())
}

/// A disk without free inodes is reported as such, not as one without space.
pub(super) fn check_disk_without_inodes() -> Result<()> {
    let directory = UserDirectory::new()?;
    std::fs::create_dir(directory.path("small"))?;
    let text = "volume w scratch 50 MB files 5000\njob j {\nexecutable = sh\n\
        arguments = -c 'for i in $$(seq 3000); do echo > /w/$i || exit 3; done'\n}\n\
        mount w j /w\n";
    directory.write_file("test.bafs", text)?;
    let script = format!(
        "mount -t tmpfs -o size=200m,nr_inodes=1500 tmpfs small && TMPDIR=$PWD/small exec {} run \
         test.bafs --local 1 --node-size 150MB --resource-timeout 5s",
        bafs_program().display()
    );
    let mut command = Command::new("unshare");
    let ended = directory.run_to_end(command.args(["-m", "sh", "-c", &script]))?;
    ended.check_code(1)?;
    let names = ["inode", "files"].iter().any(|word| ended.has_text(word));
    let is_right = names && !ended.has_text("MB free");
    ensure!(is_right, "it says: {}", last_lines(&ended.output));
    Ok(())
}

/// A failure of a job's own before it touches a watched volume repeats none of the volume's
/// producers.
pub(super) fn check_failure_beside_watched_volume() -> Result<()> {
    let directory = UserDirectory::new()?;
    let mark = directory.path("mark");
    let text = format!(
        "volume w scratch 16 MB watched\nvolume o scratch 1 MB\njob make {{\nexecutable = sh\n\
         arguments = -c 'echo made > /w/x'\n}}\njob use {{\nexecutable = sh\n\
         arguments = -c 'test -e {0} && cat /w/x > /o/y || {{ touch {0}; exit 3; }}'\n}}\n\
         parent make child use\nretry use 1\nmount w make /w\nmount w use /w\nmount o use /o\n\
         extract o y bafs://home/y\n",
        mark.display()
    );
    directory
        .run_workflow(&text, &["--local", "1"])?
        .check_code(0)?;
    let again = count_reruns(&directory.path("journal"))?;
    ensure!(
        !again.contains_key("make"),
        "the producer ran again: {again:?}"
    );
    Ok(())
}

/// That a workflow's run reports no unused volume, and gives this result.
pub(super) fn check_no_advice(text: &str, file: &str, result: &str) -> Result<()> {
    let directory = UserDirectory::new()?;
    let ended = directory.run_workflow(text, &["--local", "1"])?;
    ended.check_code(0)?;
    ensure!(
        directory.read_file(file) == result,
        "the result is '{}'",
        directory.read_file(file)
    );
    let advice = ended
        .output
        .lines()
        .find(|line| line.contains("did not use volume"));
    ensure!(advice.is_none(), "{}", advice.unwrap_or_default());
    Ok(())
}

/// Names and attributes that a job looks at are a use of the volume.
pub(super) fn check_metadata_counts_as_use() -> Result<()> {
    let text = "volume w scratch 1 MB\nvolume r scratch 1 MB\njob a {\nexecutable = mkdir\n\
        arguments = /w/ready\n}\njob b {\nexecutable = sh\n\
        arguments = -c 'test -d /w/ready && ls /w | wc -l > /r/o'\n}\nparent a child b\n\
        mount w a /w\nmount w b /w ro\nmount r b /r\nextract r o bafs://home/o\n";
    check_no_advice(text, "o", "1")
}

/// The error of a command in a test world.
pub(super) fn run_checked(world: &TestCluster, args: &[&str]) -> Result<String> {
    let output = world.bafs_command(args).output()?;
    ensure!(
        output.status.success(),
        "{args:?}: {}",
        printed_text(&output)
    );
    Ok(printed_text(&output))
}
