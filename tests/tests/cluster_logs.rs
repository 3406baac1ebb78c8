//! What jobs print: in messages, at home, and by `bafs logs`.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::{bafs_program, mount_obstacle, printed_text, report_skip};

/// A program that says 600 lines, and then fails as Python's do.
const FAILING_PROGRAM: &str = "i=0; while [ $i -lt 300 ]; do echo progress line $i; \
    echo warning line $i >&2; i=$((i + 1)); done; echo \"ValueError: no column 'barcode'\" >&2; \
    exit 1";

/// Runs a workflow that is in a directory on a throw-away cluster.
fn run_workflow(directory: &Path, text: &str, options: &[&str]) -> Result<Output> {
    let workflow = directory.join("w.bafs");
    std::fs::write(&workflow, text)?;
    let mut run = Command::new(bafs_program());
    run.arg("run").arg(&workflow).args(["--local", "1"]);
    run.args(options).stdin(Stdio::null());
    run.output().context("bafs run")
}

/// What `bafs logs` says in a directory.
fn run_logs(directory: &Path, words: &[&str]) -> Result<Output> {
    let mut logs = Command::new(bafs_program());
    logs.current_dir(directory).arg("logs").args(words);
    logs.output().context("bafs logs")
}

fn is_skipped(test: &str) -> bool {
    mount_obstacle().is_some_and(|reason| {
        report_skip(test, &reason);
        true
    })
}

#[test]
fn cluster_sends_logs_of_failed_jobs_home() -> Result<()> {
    if is_skipped("cluster_sends_logs_of_failed_jobs_home") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    std::fs::write(directory.path().join("prog.sh"), FAILING_PROGRAM)?;
    let text = |retry: u32| {
        format!(
            "volume prog cache bafs://home/prog.sh 1 MB\nvolume w scratch 10 MB\njob a {{\n \
             executable = sh\n arguments = /prog/prog.sh\n output = /w/log.out\n \
             error = /w/log.err\n retry = {retry}\n}}\nmount prog a /prog\nmount w a /w\n\
             extract w log.err bafs://home/logs/a.err\nextract w result bafs://home/result\n"
        )
    };
    let output = run_workflow(directory.path(), &text(1), &[])?;
    let said = printed_text(&output);
    ensure!(!output.status.success(), "{said}");
    for part in [
        "exited with code 1",
        "its log.err is at bafs://home/logs/a.err",
        "warning line 299",
        "ValueError: no column 'barcode'",
    ] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    let log = std::fs::read_to_string(directory.path().join("logs/a.err"))?;
    ensure!(log.lines().count() == 301, "{log}");
    ensure!(!directory.path().join("result").exists(), "half a result");
    // The same job succeeds in a later run: what was brought of its failure stands in no way.
    let mended = "echo all is well >&2; echo 1 > /w/result";
    std::fs::write(directory.path().join("prog.sh"), mended)?;
    let output = run_workflow(directory.path(), &text(0), &[])?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let log = std::fs::read_to_string(directory.path().join("logs/a.err"))?;
    ensure!(log == "all is well\n", "{log}");
    Ok(())
}

#[test]
fn cluster_reports_last_lines_of_killed_jobs() -> Result<()> {
    if is_skipped("cluster_reports_last_lines_of_killed_jobs") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume w scratch 10 MB\njob a {\n executable = sh\n arguments = -c 'echo last \
                words >&2; kill -SEGV $$'\n error = /w/log.err\n}\nmount w a /w\n";
    let said = printed_text(&run_workflow(directory.path(), text, &[])?);
    ensure!(said.contains("signal 11 (SIGSEGV)"), "{said}");
    ensure!(said.contains("    last words"), "{said}");
    Ok(())
}

#[test]
fn cluster_keeps_the_output_of_jobs() -> Result<()> {
    if is_skipped("cluster_keeps_the_output_of_jobs") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    // The first attempt fails, the second one succeeds: what it wrote the first time is gone.
    let text = "volume w scratch 10 MB\nvolume s scratch 10 MB\njob first {\n executable = sh\n \
                arguments = -c 'echo attempt; test -e /again/yes || exit 3'\n retry = 1\n}\n\
                job quiet {\n executable = true\n}\njob files {\n executable = sh\n \
                arguments = -c 'printf one; printf \"\\033[31mtwo\" >&2'\n output = /w/out\n \
                error = /w/err\n}\njob large {\n executable = sh\n arguments = -c \
                'head -c 1000000 /dev/zero | tr \"\\0\" x; echo end'\n}\n\
                mount w files /w\nmount s quiet /s\n";
    let output = run_workflow(directory.path(), text, &[])?;
    ensure!(!output.status.success(), "the first one fails");
    let printed = |words: &[&str]| -> Result<String> {
        let output = run_logs(directory.path(), words)?;
        ensure!(output.status.success(), "{}", printed_text(&output));
        Ok(String::from_utf8(output.stdout)?)
    };
    let first = printed(&["w.bafs", "first", "--attempt", "1"])?;
    ensure!(
        first.contains("attempt 1 on node n1: exits with code 3"),
        "{first}"
    );
    ensure!(first.contains("--- standard output:\nattempt\n"), "{first}");
    ensure!(first.contains("--- standard error: nothing"), "{first}");
    ensure!(
        printed(&["first"])?.contains("attempt 2"),
        "the last one is meant"
    );
    let quiet = printed(&["quiet"])?;
    ensure!(quiet.contains(": is done after"), "{quiet}");
    let files = printed(&["files"])?;
    ensure!(files.contains("--- standard output:\none\n"), "{files}");
    ensure!(
        files.contains("\u{fffd}[31mtwo"),
        "it steers no terminal: {files:?}"
    );
    let large = printed(&["large", "--stdout"])?;
    ensure!(
        large.contains("bytes left out ...]") && large.ends_with("xend\n"),
        "its end"
    );
    ensure!(
        large.len() < 300_000 && !large.contains("standard error"),
        "its bounds"
    );
    let unknown = printed_text(&run_logs(directory.path(), &["w.bafs", "lagre"])?);
    ensure!(unknown.contains("did you mean 'large'?"), "{unknown}");
    let none = printed_text(&run_logs(directory.path(), &["first", "--attempt", "9"])?);
    ensure!(none.contains("the last is 2"), "{none}");
    ensure!(
        printed(&["first", "--node", "n1"])?.contains("attempt 2"),
        "of its node"
    );
    let none = printed_text(&run_logs(directory.path(), &["first", "--node", "n2"])?);
    ensure!(none.contains("has ended on node 'n2'"), "{none}");
    // What is kept of one is removed: it is said.
    std::fs::remove_file(directory.path().join("w.bafs.logs/files.1.out"))?;
    ensure!(printed(&["files"])?.contains("[removed"), "its absence");
    Ok(())
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test waits for real processes")]
fn cluster_shows_output_of_running_jobs() -> Result<()> {
    if is_skipped("cluster_shows_output_of_running_jobs") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let release = directory.path().join("release");
    // It ends when somebody has seen what it printed.
    let text = format!(
        "job a {{\n executable = sh\n share = /tmp\n arguments = -c 'echo begun; echo warning >&2; \
         while ! test -e {}; do sleep 0.1; done; echo end'\n}}\n",
        release.display()
    );
    std::fs::write(directory.path().join("w.bafs"), text)?;
    let mut run = Command::new(bafs_program());
    run.current_dir(directory.path())
        .args(["run", "w.bafs", "--local", "1"]);
    run.stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut run = run.spawn()?;
    let logs = directory.path().join("w.bafs.logs/index");
    let began = Instant::now();
    while !logs.exists() && began.elapsed() < Duration::from_secs(60) {
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut follow = Command::new(bafs_program());
    follow
        .current_dir(directory.path())
        .args(["logs", "w.bafs", "a", "--follow"]);
    follow.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut follow = follow.spawn()?;
    let mut printed = BufReader::new(follow.stdout.take().context("a pipe")?);
    let mut line = String::new();
    printed.read_line(&mut line)?;
    let is_early = line == "begun\n" && !release.exists();
    std::fs::write(&release, "")?;
    printed.read_to_string(&mut line)?;
    let output = follow.wait_with_output()?;
    ensure!(run.wait()?.success(), "the run");
    ensure!(is_early, "{line:?}: {}", printed_text(&output));
    ensure!(output.status.success(), "{}", printed_text(&output));
    ensure!(line == "begun\nend\n", "each line once: {line:?}");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(told.starts_with("warning\n"), "{told}");
    ensure!(
        told.contains("job a, attempt 1 on node n1: is done"),
        "{told}"
    );
    Ok(())
}

#[test]
fn cluster_keeps_no_logs_inside_a_source() -> Result<()> {
    if is_skipped("cluster_keeps_no_logs_inside_a_source") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume all cache bafs://home/ 1 MB\njob a {\n executable = true\n}\n\
                mount all a /all\n";
    let output = run_workflow(directory.path(), text, &[])?;
    let said = printed_text(&output);
    ensure!(output.status.success(), "{said}");
    ensure!(said.contains("job output is not kept"), "{said}");
    ensure!(
        !directory.path().join("w.bafs.logs").exists(),
        "it is there"
    );
    Ok(())
}
