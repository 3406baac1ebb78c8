//! Running a workflow again: what changed since is done, and no more.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::bench::measure::Stopwatch;
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Samples of two jobs: `count` reads its own file of a cache that all share, `sum` what that
/// wrote. `extra` goes to each `count`.
fn sample_workflow(samples: u32, extra: &str) -> String {
    format!(
        "volume reads cache bafs://home/reads 1 MB\n\
         for s in 1..{samples}\n\
         volume counted$(s) scratch 1 MB files 10\n\
         volume summed$(s) scratch 1 MB files 10\n\
         job count$(s) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"{extra} wc -l < /reads/$(s).txt > /out/lines; \
           cat /reads/$(s).txt > /out/all\"\n\
         }}\n\
         job sum$(s) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"cat /in/lines > /out/sum && cksum < /in/all >> /out/sum\"\n\
         }}\n\
         parent count$(s) child sum$(s)\n\
         mount reads count$(s) /reads\n\
         mount counted$(s) count$(s) /out\n\
         mount counted$(s) sum$(s) /in ro\n\
         mount summed$(s) sum$(s) /out\n\
         extract summed$(s) sum bafs://home/out/$(s)\n\
         end\n"
    )
}

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(&["20MB", "20MB"])?;
    world.wait_for_servers(3)?;
    Ok(Some(world))
}

fn write_reads(world: &TestCluster, samples: u32) -> Result<()> {
    for sample in 1..=samples {
        let text = format!("read of sample {sample}\n");
        world.write_home(&format!("reads/{sample}.txt"), text.as_bytes())?;
    }
    Ok(())
}

/// Runs a workflow to its end; the jobs that ran, sorted.
fn run_jobs(world: &TestCluster, options: &[&str]) -> Result<Vec<String>> {
    let path = world.home.path().join("test.bafs");
    let path = path.to_string_lossy();
    let args = [&["run", &*path, "--json"], options].concat();
    let output = world.bafs_command(&args).output()?;
    ensure!(output.status.success(), printed_text(&output));
    names_of(&output.stdout)
}

fn names_of(stdout: &[u8]) -> Result<Vec<String>> {
    let report: serde_json::Value = serde_json::from_slice(stdout)?;
    let jobs = report["jobs"].as_array().context("a report has jobs")?;
    let names = jobs.iter().filter_map(|job| job["name"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

fn write_workflow(world: &TestCluster, text: &str) -> Result<()> {
    std::fs::write(world.home.path().join("test.bafs"), text)?;
    Ok(())
}

#[test]
fn cluster_runs_again_only_what_changed() -> Result<()> {
    let Some(world) = start_cluster("cluster_runs_again_only_what_changed")? else {
        return Ok(());
    };
    write_reads(&world, 3)?;
    write_workflow(&world, &sample_workflow(2, ""))?;
    ensure!(run_jobs(&world, &[])? == ["count1", "count2", "sum1", "sum2"]);
    ensure!(run_jobs(&world, &[])?.is_empty(), "nothing changed");

    world.write_home("reads/2.txt", b"another read\n")?;
    let dry = world.run_json(&["run", &workflow_path(&world), "--dry-run"])?;
    ensure!(dry["up_to_date"] == 2, "{dry}");
    let reason = dry["run"][0]["text"].as_str().unwrap_or_default();
    ensure!(
        reason == "its input bafs://home/reads/2.txt changed",
        "{dry}"
    );
    ensure!(run_jobs(&world, &[])? == ["count2", "sum2"]);
    let sum = world.read_home("out/2")?;
    let again = run_jobs(&world, &["--forced"])?;
    ensure!(again.len() == 4, "all are forced: {again:?}");
    ensure!(world.read_home("out/2")? == sum);

    // A sample more runs alone, although its file is in a directory that all read.
    write_workflow(&world, &sample_workflow(3, ""))?;
    ensure!(run_jobs(&world, &[])? == ["count3", "sum3"]);
    // Others have a new name there, which nobody looked for.
    world.write_home("reads/9.txt", b"x\n")?;
    ensure!(run_jobs(&world, &[])?.is_empty());

    // A result that somebody changes or removes is made again.
    world.write_home("out/1", b"edited\n")?;
    ensure!(run_jobs(&world, &[])? == ["count1", "sum1"]);
    std::fs::remove_file(world.home.path().join("out/3"))?;
    ensure!(run_jobs(&world, &[])? == ["count3", "sum3"]);
    ensure!(run_jobs(&world, &["--from", "sum2"])? == ["count2", "sum2"]);

    // An edit of one job, and a sample less.
    write_workflow(&world, &sample_workflow(2, "true;"))?;
    let all = ["count1", "count2", "sum1", "sum2"];
    ensure!(run_jobs(&world, &[])? == all);
    Ok(())
}

fn workflow_path(world: &TestCluster) -> String {
    let path = world.home.path().join("test.bafs");
    path.to_string_lossy().into_owned()
}

/// Sample 2 fails in its second job; the volume of the first stays, and the next run uses it.
#[test]
fn cluster_keeps_volumes_of_a_failed_run() -> Result<()> {
    let Some(world) = start_cluster("cluster_keeps_volumes_of_a_failed_run")? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    let flag = world.home.path().join("mended");
    let text = sample_workflow(2, "").replace(
        "cat /in/lines > /out/sum &&",
        &format!("test -e {} && cat /in/lines > /out/sum &&", flag.display()),
    );
    write_workflow(&world, &text)?;
    let path = workflow_path(&world);
    let count_kept = || -> Result<usize> {
        let kept = world.run_json(&["volume", "list"])?;
        Ok(kept.as_array().context("a list")?.len())
    };
    let fail = |options: &[&str]| -> Result<String> {
        let run = [&["run", &path], options].concat();
        let output = world.bafs_command(&run).output()?;
        ensure!(!output.status.success(), printed_text(&output));
        Ok(printed_text(&output))
    };
    let told = fail(&["--keep", "0"])?;
    ensure!(count_kept()? == 0 && !told.contains("kept for"), "{told}");
    let told = fail(&[])?;
    let command = format!("bafs volume delete --kept {path}");
    let is_told = told.contains("kept for the next run: 2 finished volumes (");
    ensure!(is_told && told.contains("), for 2 d, or"), "{told}");
    ensure!(told.contains(&command), "{told}");
    ensure!(count_kept()? == 2);
    let deleted = world.run_json(&["volume", "delete", "--kept", &path])?;
    let ids = deleted["deleted"].as_array().context("ids")?;
    ensure!(ids.len() == 2 && count_kept()? == 0, "{deleted}");
    fail(&[])?;
    ensure!(count_kept()? == 2);
    std::fs::write(&flag, b"")?;
    let ran = run_jobs(&world, &[])?;
    ensure!(ran == ["sum1", "sum2"], "{ran:?}");
    ensure!(count_kept()? == 0, "a complete run keeps nothing");
    ensure!(run_jobs(&world, &[])?.is_empty());
    Ok(())
}

/// What a failed run keeps fills most of the only node. Another workflow gets the room at once, and
/// the first one goes on without it.
#[test]
fn kept_volumes_give_way_to_another_workflow() -> Result<()> {
    let name = "kept_volumes_give_way_to_another_workflow";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let flag = world.home.path().join("mended");
    let text = |name: &str, second: &str| {
        format!(
            "volume {name} scratch 14 MB files 10\nvolume {name}.out scratch 1 MB files 10\n\
             job make {{\nexecutable = sh\narguments = -c \"echo made > /w/x\"\n}}\n\
             job use {{\nexecutable = sh\narguments = -c \"{second} cp /in/x /out/y\"\n}}\n\
             parent make child use\nmount {name} make /w\nmount {name} use /in ro\n\
             mount {name}.out use /out\nextract {name}.out y bafs://home/out/{name}\n"
        )
    };
    let fails = format!("test -e {} &&", flag.display());
    write_workflow(&world, &text("first", &fails))?;
    let path = workflow_path(&world);
    let output = world.bafs_command(&["run", &path, "--json"]).output()?;
    ensure!(!output.status.success(), printed_text(&output));
    let kept = world.run_json(&["volume", "list"])?;
    ensure!(kept.as_array().is_some_and(|all| all.len() == 1), "{kept}");
    let dry = world.run_json(&["run", &path, "--dry-run"])?;
    ensure!(
        dry["run"].as_array().is_some_and(|run| run.len() == 1),
        "{dry}"
    );

    let other = world.home.path().join("other.bafs");
    std::fs::write(&other, text("second", ""))?;
    let began = Stopwatch::start();
    let output = world
        .bafs_command(&["run", &other.to_string_lossy(), "--json"])
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    let took = began.elapsed();
    ensure!(
        took < Duration::from_secs(20),
        "it waited for room: {took:?}"
    );
    let left = world.run_json(&["volume", "list"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "left: {left}");

    std::fs::write(&flag, b"")?;
    let ran = run_jobs(&world, &[])?;
    ensure!(ran == ["make", "use"], "what was kept is gone: {ran:?}");
    Ok(())
}

/// Runs without volumes, or with caches only, are followed by ordinary ones.
#[test]
fn declaring_a_measured_size_runs_nothing() -> Result<()> {
    let Some(world) = start_cluster("declaring_a_measured_size_runs_nothing")? else {
        return Ok(());
    };
    let workflow = |size: &str| {
        format!(
            "volume u scratch {size}\njob j {{\nexecutable = /bin/sh\n\
             arguments = -c \"echo result > /u/out\"\n}}\nmount u j /u\n\
             extract u out bafs://home/out\n"
        )
    };
    write_workflow(&world, &workflow("unknown"))?;
    ensure!(run_jobs(&world, &[])? == ["j"]);
    write_workflow(&world, &workflow("2 MB"))?;
    ensure!(run_jobs(&world, &[])?.is_empty());
    write_workflow(&world, &workflow("3 MB"))?;
    ensure!(run_jobs(&world, &[])?.is_empty(), "no size was noted yet");
    Ok(())
}

#[test]
fn runs_without_volumes_leave_records() -> Result<()> {
    let Some(world) = start_cluster("runs_without_volumes_leave_records")? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    write_workflow(&world, &sample_workflow(2, ""))?;
    for option in ["--cache-only", "--remote-io"] {
        ensure!(run_jobs(&world, &["--forced", option])?.len() == 4);
        ensure!(
            run_jobs(&world, &[])?.is_empty(),
            "nothing changed: {option}"
        );
    }
    world.write_home("reads/2.txt", b"another read\n")?;
    ensure!(!run_jobs(&world, &[])?.is_empty(), "an input changed");
    Ok(())
}

/// A script and a file of the host that a job names are part of it.
#[test]
fn local_run_sees_changed_scripts_and_files() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("local_run_sees_changed_scripts_and_files", &reason);
        return Ok(());
    }
    // The machine's /tmp is not what jobs see.
    let home = tempfile::tempdir_in(bafs_program().parent().context("it is in a directory")?)?;
    let data = home.path().join("data.txt");
    let script = home.path().join("copy.sh");
    std::fs::write(&data, "one\n")?;
    std::fs::write(&script, "cat \"$1\" > /out/r\n")?;
    let workflow = format!(
        "volume out scratch 1 MB files 10\n\
         job copy {{\nexecutable = sh\narguments = copy.sh {}\n}}\n\
         mount out copy /out\nextract out r bafs://home/r\n",
        data.display()
    );
    std::fs::write(home.path().join("test.bafs"), workflow)?;
    let result = || std::fs::read_to_string(home.path().join("r"));
    ensure!(run_locally(home.path(), &[])? == ["copy"]);
    ensure!(result()? == "one\n");
    ensure!(run_locally(home.path(), &[])?.is_empty());
    std::fs::write(&data, "two\n")?;
    ensure!(run_locally(home.path(), &[])? == ["copy"], "a file changed");
    ensure!(result()? == "two\n");
    std::fs::write(&script, "echo edited > /out/r\n")?;
    ensure!(
        run_locally(home.path(), &[])? == ["copy"],
        "its script changed"
    );
    ensure!(result()? == "edited\n");
    ensure!(run_locally(home.path(), &[])?.is_empty());
    Ok(())
}

/// A directory where a result is to go is told before the first job runs.
#[test]
fn run_is_refused_where_a_target_is_a_directory() -> Result<()> {
    let Some(world) = start_cluster("run_is_refused_where_a_target_is_a_directory")? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    write_workflow(&world, &sample_workflow(2, ""))?;
    std::fs::create_dir_all(world.home.path().join("out/2"))?;
    let output = world
        .bafs_command(&["run", &workflow_path(&world)])
        .output()?;
    let told = printed_text(&output);
    ensure!(!output.status.success(), "{told}");
    let expected = "1 extract would replace a directory\n  bafs://home/out/2\n  to do: ";
    ensure!(told.contains(expected), "{told}");
    ensure!(world.read_home("out/1").is_err(), "no job ran");
    std::fs::remove_dir(world.home.path().join("out/2"))?;
    ensure!(run_jobs(&world, &[])?.len() == 4);
    Ok(())
}

/// A run is killed, and its cluster is gone. On another one it begins anew, and does not wait for
/// the old home.
#[test]
fn interrupted_run_begins_anew_on_another_cluster() -> Result<()> {
    let name = "interrupted_run_begins_anew_on_another_cluster";
    let Some(world) = start_cluster(name)? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    let slow = "test $(s) = 1 || sleep 2;";
    write_workflow(&world, &sample_workflow(2, slow))?;
    let path = workflow_path(&world);
    let mut run = start_until_first_result(&world, &path)?;
    kill(Pid::from_raw(i32::try_from(run.id())?), Signal::SIGKILL)?;
    run.wait()?;
    let other = TestCluster::start(&["20MB", "20MB"])?;
    other.wait_for_servers(3)?;
    write_reads(&other, 2)?;
    let began = Stopwatch::start();
    let output = other.bafs_command(&["run", &path]).output()?;
    let told = printed_text(&output);
    ensure!(output.status.success(), "{told}");
    ensure!(told.contains("had the home 'home' at"), "{told}");
    let took = began.elapsed();
    ensure!(took < Duration::from_secs(60), "it waited: {took:?}");
    ensure!(other.read_home("out/1").is_ok() && other.read_home("out/2").is_ok());
    Ok(())
}

/// Starts a run, and waits until the result of sample 1 is at home.
fn start_until_first_result(world: &TestCluster, path: &str) -> Result<Child> {
    let mut run = world.bafs_command(&["run", path, "--json"]);
    let run = run.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    for _ in 0..600 {
        if world.read_home("out/1").is_ok() {
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(run)
}

/// A scheduler is killed, and the workflow edited: what it left is stopped, and what is still right
/// does not run again.
#[test]
fn cluster_goes_on_after_a_kill_and_an_edit() -> Result<()> {
    let Some(world) = start_cluster("cluster_goes_on_after_a_kill_and_an_edit")? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    let slow = "test $(s) = 1 || sleep 600;";
    write_workflow(&world, &sample_workflow(2, slow))?;
    let path = workflow_path(&world);
    let mut run = start_until_first_result(&world, &path)?;
    let refused = world.bafs_command(&["run", &path]).output()?;
    let told = printed_text(&refused);
    ensure!(!refused.status.success(), "two runs at once: {told}");
    let holder = format!("process {} on host ", run.id());
    ensure!(told.contains(&holder), "the holder is named: {told}");
    kill(Pid::from_raw(i32::try_from(run.id())?), Signal::SIGKILL)?;
    run.wait()?;
    let text = sample_workflow(2, slow).replace("sleep 600", "sleep 0");
    write_workflow(&world, &text)?;
    let ran = run_jobs(&world, &[])?;
    ensure!(ran == ["count1", "count2", "sum1", "sum2"], "{ran:?}");
    ensure!(run_jobs(&world, &[])?.is_empty());
    Ok(())
}

/// The scheduler is killed when one sample is at home. Before the run goes on, an input of that
/// sample changes, and its result is removed.
#[test]
fn cluster_resumes_a_run_with_what_changed_meanwhile() -> Result<()> {
    let Some(world) = start_cluster("cluster_resumes_a_run_with_what_changed_meanwhile")? else {
        return Ok(());
    };
    write_reads(&world, 2)?;
    let slow = "test $(s) = 1 || sleep 2;";
    write_workflow(&world, &sample_workflow(2, slow))?;
    let mut run = start_until_first_result(&world, &workflow_path(&world))?;
    kill(Pid::from_raw(i32::try_from(run.id())?), Signal::SIGKILL)?;
    run.wait()?;
    world.write_home("reads/1.txt", b"two\nlines\n")?;
    std::fs::remove_file(world.home.path().join("out/1"))?;
    let ran = run_jobs(&world, &[])?;
    ensure!(ran == ["count1", "sum1"], "{ran:?}");
    let sum = world.read_home("out/1")?;
    ensure!(sum.starts_with(b"2\n"), "of the new input: {sum:?}");
    ensure!(world.read_home("out/2").is_ok());
    ensure!(run_jobs(&world, &[])?.is_empty());
    Ok(())
}

/// A set at home of which a file is removed or changed is made again; a job that reads a source of
/// one file is up to date.
#[test]
fn local_run_compares_files_of_sets_and_sources_of_one_file() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(
            "local_run_compares_files_of_sets_and_sources_of_one_file",
            &reason,
        );
        return Ok(());
    }
    let home = tempfile::tempdir()?;
    std::fs::write(home.path().join("input"), "some text")?;
    let workflow = "volume one cache bafs://home/input 1 MB\n\
         volume made scratch 1 MB files 10\n\
         job copy {\nexecutable = /bin/sh\n\
         arguments = -c \"ls /in; cat /in/input > /out/a.txt; echo b > /out/b.txt\"\n}\n\
         mount one copy /in\nmount made copy /out\n\
         extract made *.txt bafs://home/set/\n";
    std::fs::write(home.path().join("test.bafs"), workflow)?;
    let (none, all): ([&str; 0], _) = ([], ["copy"]);
    ensure!(run_locally(home.path(), &[])? == all);
    ensure!(run_locally(home.path(), &[])? == none);
    std::fs::remove_file(home.path().join("set/b.txt"))?;
    ensure!(run_locally(home.path(), &[])? == all, "a file is missing");
    ensure!(run_locally(home.path(), &[])? == none);
    std::fs::write(home.path().join("set/b.txt"), "c\n")?;
    ensure!(run_locally(home.path(), &[])? == all, "a file was changed");
    ensure!(std::fs::read_to_string(home.path().join("set/b.txt"))? == "b\n");
    std::fs::write(home.path().join("input"), "other text")?;
    ensure!(run_locally(home.path(), &[])? == all);
    ensure!(run_locally(home.path(), &[])? == none);
    Ok(())
}

fn run_locally(directory: &Path, options: &[&str]) -> Result<Vec<String>> {
    let mut run = Command::new(bafs_program());
    run.arg("run").arg(directory.join("test.bafs"));
    run.args(["--local", "1", "--json"]).args(options);
    let output = run.stdin(Stdio::null()).output()?;
    ensure!(output.status.success(), printed_text(&output));
    names_of(&output.stdout)
}

#[test]
fn local_run_brings_up_to_date() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("local_run_brings_up_to_date", &reason);
        return Ok(());
    }
    let home = tempfile::tempdir()?;
    std::fs::create_dir(home.path().join("reads"))?;
    for sample in ["1", "2"] {
        std::fs::write(home.path().join(format!("reads/{sample}.txt")), sample)?;
    }
    std::fs::write(home.path().join("test.bafs"), sample_workflow(2, ""))?;
    ensure!(run_locally(home.path(), &[])?.len() == 4);
    ensure!(run_locally(home.path(), &[])?.is_empty());
    std::fs::write(home.path().join("reads/1.txt"), "changed")?;
    ensure!(run_locally(home.path(), &[])? == ["count1", "sum1"]);
    ensure!(home.path().join("test.bafs.journal").exists());
    ensure!(!home.path().join("test.bafs.journal.lock").exists());
    Ok(())
}
