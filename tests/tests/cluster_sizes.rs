//! Sizes, limits and messages of runs on real processes: what nobody declared is measured once,
//! what never fits is refused before it runs, and what nobody counts is no fact.

use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::small_disk::{fill_disk, path_in_namespace, start_node_on_disk};
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

/// A cluster of nodes of these sizes, unless nothing can be mounted here.
fn start_cluster(name: &str, sizes: &[&str]) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(sizes)?;
    world.wait_for_servers(1 + sizes.len())?;
    Ok(Some(world))
}

fn run_workflow(world: &TestCluster, text: &str) -> Result<Output> {
    let path = world.write_workflow(text)?.to_string_lossy().into_owned();
    Ok(world.bafs_command(&["run", &path, "--json"]).output()?)
}

fn run_to_completion(world: &TestCluster, text: &str) -> Result<serde_json::Value> {
    let output = run_workflow(world, text)?;
    ensure!(output.status.success(), printed_text(&output));
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// How often jobs were tried, all together.
fn count_attempts(report: &serde_json::Value) -> u64 {
    let jobs = report["jobs"].as_array().into_iter().flatten();
    jobs.filter_map(|job| job["attempts"].as_u64()).sum()
}

#[test]
fn cluster_measures_gathered_unknown_sizes_once() -> Result<()> {
    let name = "cluster_measures_gathered_unknown_sizes_once";
    for sizes in [&["600MB"][..], &["600MB", "600MB", "600MB"]] {
        let Some(world) = start_cluster(name, sizes)? else {
            return Ok(());
        };
        let text = "job all {\nexecutable = sh\narguments = -c 'ls -l /in/*/x > /out/list'\n}\n\
            volume out scratch 1 MB files 10\nmount out all /out\n\
            extract out list bafs://home/list\n\
            for i in 1..12\nvolume w$(i) scratch unknown\n\
            job s$(i) {\nexecutable = sh\narguments = -c 'head -c 25000000 /dev/zero > /w/x'\n}\n\
            mount w$(i) s$(i) /w\nmount w$(i) all /in/$(i) ro\nparent s$(i) child all\nend\n";
        let report = run_to_completion(&world, text)?;
        ensure!(count_attempts(&report) == 13, "{report}");
        let list = String::from_utf8(world.read_home("list")?)?;
        ensure!(list.matches(" 25000000 ").count() == 12, "{list}");
    }
    Ok(())
}

#[test]
fn cluster_measures_joined_pipelines_with_own_inputs() -> Result<()> {
    let name = "cluster_measures_joined_pipelines_with_own_inputs";
    let Some(world) = start_cluster(name, &["600MB", "600MB"])? else {
        return Ok(());
    };
    for sample in 1..=12 {
        world.write_home(&format!("reads/{sample}/r"), b"reads")?;
    }
    let text = "job all {\nexecutable = sh\narguments = -c 'cat /in/*/y > /out/list'\n}\n\
        volume out scratch 1 MB files 10\nmount out all /out\n\
        extract out list bafs://home/list\n\
        for i in 1..12\nvolume reads$(i) cache bafs://home/reads/$(i) 1 MB\n\
        volume w$(i) scratch unknown\nvolume v$(i) scratch unknown\n\
        job s$(i) {\nexecutable = sh\n\
        arguments = -c 'cat /reads/r > /w/r; head -c 20000000 /dev/zero > /w/x'\n}\n\
        job t$(i) {\nexecutable = sh\narguments = -c 'wc -c < /w/x > /v/y'\n}\n\
        mount reads$(i) s$(i) /reads\nmount w$(i) s$(i) /w\nmount w$(i) t$(i) /w ro\n\
        mount v$(i) t$(i) /v\nmount v$(i) all /in/$(i) ro\n\
        parent s$(i) child t$(i)\nparent t$(i) child all\nend\n";
    let report = run_to_completion(&world, text)?;
    // Of 24 volumes that must fit, the first gets less than it needs, and only that one.
    ensure!(count_attempts(&report) == 26, "{report}");
    let path = world.home.path().join("test.bafs");
    let path = path.to_string_lossy();
    let output = world.bafs_command(&["sizes", &path]).output()?;
    let patch = String::from_utf8(output.stdout)?;
    ensure!(patch.contains("+volume w$(i) scratch 26 MB"), "{patch}");
    ensure!(patch.contains("+volume v$(i) scratch 2 MB"), "{patch}");
    let output = world.bafs_command(&["why", &path, "w3"]).output()?;
    let told = printed_text(&output);
    ensure!(told.contains("volume w3 held up to 20004"), "{told}");
    ensure!(
        told.contains("its size is unknown in the workflow"),
        "{told}"
    );
    let report = world.run_json(&["report", &path])?;
    let sizes = report["volume_sizes"]
        .as_array()
        .context("there are sizes")?;
    let measured = sizes.iter().filter(|it| it["declared_bytes"].is_null());
    ensure!(measured.count() == 24, "{sizes:?}");
    Ok(())
}

#[test]
fn cluster_jobs_of_unknown_size_await_other_runs() -> Result<()> {
    let name = "cluster_jobs_of_unknown_size_await_other_runs";
    let Some(world) = start_cluster(name, &["70MB", "70MB"])? else {
        return Ok(());
    };
    let started = world.home.path().join("started");
    let hog = format!(
        "for i in 1..2\nvolume w$(i) scratch 68 MB\njob h$(i) {{\nexecutable = sh\n\
         arguments = -c 'echo x >> {}; sleep 6'\n}}\nmount w$(i) h$(i) /w\nend\n",
        started.display()
    );
    let text = "for i in 1..2\nvolume u$(i) scratch unknown\njob k$(i) {\nexecutable = sh\n\
        arguments = -c 'head -c 2000000 /dev/zero > /u/x'\n}\nmount u$(i) k$(i) /u\nend\n";
    let path = world.home.path().join("hog.bafs");
    fs::write(&path, hog)?;
    let path = path.to_string_lossy();
    let mut other = world.bafs_command(&["run", &path, "--user", "bob"]);
    let mut other = other.stdout(Stdio::null()).spawn()?;
    wait_until(|| fs::read(&started).is_ok_and(|lines| lines.len() >= 4))?;
    let path = world.write_workflow(text)?.to_string_lossy().into_owned();
    let output = world
        .bafs_command(&["run", &path, "--user", "alice"])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    ensure!(
        !printed_text(&output).contains("ran out of space"),
        printed_text(&output)
    );
    ensure!(other.wait()?.success(), "the other run fails");
    Ok(())
}

fn wait_until(is_so: impl Fn() -> bool) -> Result<()> {
    #[expect(clippy::disallowed_methods, reason = "a test waits for a fact")]
    let until = Instant::now() + Duration::from_secs(30);
    while !is_so() {
        #[expect(clippy::disallowed_methods, reason = "a test waits for a fact")]
        let now = Instant::now();
        ensure!(now < until, "it does not come");
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[test]
fn cluster_refuses_impossible_gathering_jobs() -> Result<()> {
    let name = "cluster_refuses_impossible_gathering_jobs";
    let Some(world) = start_cluster(name, &["100MB"])? else {
        return Ok(());
    };
    let ran = world.home.path().join("ran");
    let text = format!(
        "for i in 1..40\nvolume v$(i) scratch 3 MB files 5\njob m$(i) {{\nexecutable = touch\n\
         arguments = {}\n}}\nmount v$(i) m$(i) /o\nmount v$(i) sum /in/$(i) ro\n\
         parent m$(i) child sum\nend\njob sum {{\nexecutable = true\n}}\n",
        ran.display()
    );
    let output = run_workflow(&world, &text)?;
    ensure!(output.status.code() == Some(1), printed_text(&output));
    ensure!(
        printed_text(&output).contains("'sum'"),
        printed_text(&output)
    );
    ensure!(!ran.exists(), "a job ran");
    Ok(())
}

#[test]
fn cluster_calls_no_used_volume_unused() -> Result<()> {
    let name = "cluster_calls_no_used_volume_unused";
    let Some(world) = start_cluster(name, &["1GB"])? else {
        return Ok(());
    };
    world.write_home("in/file", b"x")?;
    let text = "volume w scratch 1 MB\nvolume r scratch 1 MB\nvolume b scratch 1 MB watched\n\
        volume c cache bafs://home/in 1 MB\n\
        job a {\nexecutable = sh\narguments = -c 'mkdir /w/ready; echo x > /b/x'\n}\n\
        job b {\nexecutable = sh\n\
        arguments = -c 'test -d /w/ready && ls /w | wc -l > /r/o; test -e /c/none; test -e /b/x'\n\
        }\n\
        parent a child b\nmount w a /w\nmount w b /w ro\nmount r b /r\nmount b a /b\n\
        mount b b /b ro\nmount c b /c\nextract r o bafs://home/o\n";
    let report = run_to_completion(&world, text)?;
    let warnings = report["warnings"].as_array();
    ensure!(warnings.is_some_and(Vec::is_empty), "{report}");
    ensure!(world.read_home("o")? == b"1\n", "the wrong result");
    // What a job does nothing with is still told; this is another workflow in the same place.
    fs::remove_file(world.home.path().join("test.bafs.journal"))?;
    let idle =
        "volume w scratch 1 MB\njob a {\nexecutable = true\ndirectory = /\n}\nmount w a /w\n";
    let report = run_to_completion(&world, idle)?;
    let told = report["warnings"].to_string();
    ensure!(told.contains("did not use volume 'w'"), "{told}");
    Ok(())
}

#[test]
fn cluster_own_failure_keeps_an_untouched_watched_volume() -> Result<()> {
    let name = "cluster_own_failure_keeps_an_untouched_watched_volume";
    let Some(world) = start_cluster(name, &["1GB"])? else {
        return Ok(());
    };
    let log = world.home.path().join("log");
    let text = format!(
        "volume w scratch 16 MB watched\n\
         job a {{\nexecutable = sh\narguments = -c 'echo a >> {log}; echo x > /w/x'\n}}\n\
         job b {{\nexecutable = sh\nretry = 2\n\
         arguments = -c 'echo b >> {log}; test $$(grep -c b {log}) = 2 || exit 3; cat /w/x'\n}}\n\
         parent a child b\nmount w a /w\nmount w b /w\n",
        log = log.display()
    );
    let report = run_to_completion(&world, &text)?;
    ensure!(fs::read(&log)? == b"a\nb\nb\n", "{report}");
    Ok(())
}

#[test]
fn cluster_blames_no_job_for_a_full_disk() -> Result<()> {
    let name = "cluster_blames_no_job_for_a_full_disk";
    let Some(world) = start_cluster(name, &["1MB"])? else {
        return Ok(());
    };
    if !nix::unistd::geteuid().is_root() {
        report_skip(name, "it needs root to mount a small file system");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let store = directory.path().to_string_lossy().into_owned();
    let mut node = start_node_on_disk("-t tmpfs -o size=600m tmpfs", &world, &store)?;
    world.wait_for_servers(3)?;
    let filler = path_in_namespace(&node, &store).join("filler");
    let (begun, go_on) = (
        world.home.path().join("begun"),
        world.home.path().join("go"),
    );
    let text = format!(
        "volume w scratch 16 MB watched\njob j {{\nexecutable = sh\n\
         arguments = -c 'touch {}; until test -e {}; do sleep 0.1; done; \
         head -c 2000000 /dev/zero > /w/x'\n}}\nmount w j /w\n",
        begun.display(),
        go_on.display()
    );
    let path = world.write_workflow(&text)?.to_string_lossy().into_owned();
    let mut command = world.bafs_command(&["run", &path]);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let running = command.spawn()?;
    wait_until(|| begun.exists())?;
    fill_disk(&filler)?;
    fs::write(&go_on, "")?;
    // The first attempt meets the full disk, and the next one comes after ten seconds.
    std::thread::sleep(Duration::from_secs(3));
    fs::remove_file(&filler)?;
    let output = running.wait_with_output()?;
    ensure!(output.status.success(), printed_text(&output));
    let told = "'j' failed and runs again: volume 'w' ran out of space below its limit of 16.0 MB";
    ensure!(printed_text(&output).contains(told), printed_text(&output));
    drop(node.stdin.take());
    node.wait()?;
    Ok(())
}

#[test]
fn cluster_refuses_watched_volumes_without_margin_space() -> Result<()> {
    let name = "cluster_refuses_watched_volumes_without_margin_space";
    let Some(world) = start_cluster(name, &["80MB"])? else {
        return Ok(());
    };
    let create = [
        "volume", "create", "v", "--node", "n1", "--limit", "watched",
    ];
    let mut command: Command = world.bafs_command(&[&create[..], &["--size", "16MB"]].concat());
    let told = printed_text(&command.output().context("it says why")?);
    ensure!(
        told.contains("needs 83108864 bytes (with the margin"),
        "{told}"
    );
    Ok(())
}

#[test]
fn cluster_makes_directories_of_output_files() -> Result<()> {
    let name = "cluster_makes_directories_of_output_files";
    let Some(world) = start_cluster(name, &["100MB"])? else {
        return Ok(());
    };
    let text = "volume v scratch 1 MB files 10\njob a {\nexecutable = sh\n\
        arguments = -c 'echo out; echo err >&2'\noutput = logs/deep/out\nerror = logs/err\n}\n\
        mount v a /v\nextract v logs/deep/out bafs://home/out\nextract v logs/err bafs://home/err\n";
    run_to_completion(&world, text)?;
    ensure!(world.read_home("out")? == b"out\n" && world.read_home("err")? == b"err\n");
    Ok(())
}
