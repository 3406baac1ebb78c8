//! A workflow whose inputs are on a web server and whose results go to a host behind SSH, by real
//! processes of BAFS and of others.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::bench::measure::Stopwatch;
use bafs_tests::external_servers::{start_nginx, start_sshd};
use bafs_tests::{
    bafs_program, exec_job, mount_obstacle, printed_text, processes_matching, report_skip,
};

#[test]
fn cluster_runs_a_workflow_between_foreign_homes() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_runs_a_workflow_between_foreign_homes", &reason);
        return Ok(());
    }
    let own = tempfile::tempdir()?;
    let (web, out, etc) = (
        own.path().join("web"),
        own.path().join("out"),
        own.path().join("etc"),
    );
    for directory in [&web, &out, &etc] {
        std::fs::create_dir(directory)?;
    }
    let data: String = (0..50_000).map(|line| format!("line {line}\n")).collect();
    std::fs::create_dir(web.join("db"))?;
    std::fs::write(web.join("db/data"), &data)?;
    std::fs::write(web.join("db/bafs.list"), "data\n")?;
    std::fs::write(web.join("query"), "line 4242\n")?;
    let (_nginx, http, https) = start_nginx(&etc, &web)?;
    let (_sshd, ssh, settings) = start_sshd(&etc)?;
    let homes = own.path().join("homes.toml");
    // The second page is for those who have its token.
    let bearer = format!("[[home]]\nurl = \"https://127.0.0.1:{https}\"\ntoken = \"sesame\"\n");
    std::fs::write(&homes, settings + &bearer)?;
    std::fs::set_permissions(&homes, std::fs::Permissions::from_mode(0o600))?;
    let workflow = own.path().join("search.bafs");
    let text = format!(
        "volume db cache http://127.0.0.1:{http}/db 1 MB\n\
         for i in 1..2\n\
         volume query$(i) scratch 100 KB files 10 from https://127.0.0.1:{https}/query\n\
         volume work$(i) scratch 1 MB files 10\n\
         job search$(i) {{\n\
           executable = /bin/sh\n\
           arguments = -c \"grep -nxf /in/query /db/data > /scratch/found; \
           wc -c < /db/data >> /scratch/found\"\n\
         }}\n\
         mount db search$(i) /db\n\
         mount query$(i) search$(i) /in ro\n\
         mount work$(i) search$(i) /scratch\n\
         extract work$(i) found sftp://127.0.0.1:{ssh}{}/$(i)\n\
         end\n",
        out.display()
    );
    std::fs::write(&workflow, text)?;
    let mut run = Command::new(bafs_program());
    run.args(["run", "--local", "2"])
        .arg(&workflow)
        .env("BAFS_HOMES", &homes)
        .env("SSL_CERT_FILE", etc.join("certificate"));
    let done = run.stdin(Stdio::null()).output()?;
    ensure!(done.status.success(), "{}", printed_text(&done));
    let expected = format!("4243:line 4242\n{}\n", data.len());
    for i in 1..=2 {
        let found = std::fs::read_to_string(out.join(i.to_string()))?;
        ensure!(found == expected, "result {i} is {found:?}");
    }
    ensure!(std::fs::read_dir(&out)?.count() == 2, "uploads are left");
    let ssh = || processes_matching(&format!("-i {}", etc.join("key").display()));
    for _ in 0..500 {
        if ssh().is_empty() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    ensure!(ssh().is_empty(), "ssh is left: {:?}", ssh());
    Ok(())
}

/// A home that is away when a run begins is waited for, as one that goes away later.
#[test]
fn cluster_run_waits_for_an_absent_home() -> Result<()> {
    let test = "cluster_run_waits_for_an_absent_home";
    let Some(mut world) = exec_job::start_cluster(test, "20MB")? else {
        return Ok(());
    };
    world.write_home("in/a", b"a\n")?;
    let workflow = world.write_workflow(
        "volume s scratch 1 MB from bafs://home/in\njob j {\nexecutable = /bin/cat\n\
         arguments = /s/a\n}\nmount s j /s\nextract s a bafs://home/b\n",
    )?;
    world.cluster.kill("home")?;
    let listed = || anyhow::Ok(world.run_json(&["servers"])?.as_array().map_or(0, Vec::len));
    wait_until(Duration::from_secs(30), || Ok(listed()? == 1)).context("it leaves the catalog")?;
    let mut command = world.bafs_command(&["run", &workflow.to_string_lossy()]);
    let mut run = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    // Longer than the catalog takes to say that nobody has the name.
    std::thread::sleep(Duration::from_secs(12));
    ensure!(run.try_wait()?.is_none(), "the run does not wait");
    world.cluster.restart("home")?;
    let output = run.wait_with_output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    ensure!(world.read_home("b")? == b"a\n");
    Ok(())
}

/// Told before anything runs, and waited for no longer than the user wants.
#[test]
fn cluster_run_names_a_home_that_nobody_lists() -> Result<()> {
    let test = "cluster_run_names_a_home_that_nobody_lists";
    let Some(world) = exec_job::start_cluster(test, "20MB")? else {
        return Ok(());
    };
    let workflow = world.write_workflow(
        "volume s scratch 1 MB from bafs://hom/in\njob j {\nexecutable = /bin/true\n}\n\
         mount s j /s\n",
    )?;
    let workflow = workflow.to_string_lossy();
    let told = "1 home is not in the catalog\n  bafs://hom/\n  to do: correct the names";
    let checked = world.bafs_command(&["check", &workflow]).output()?;
    ensure!(
        printed_text(&checked).contains(told),
        "{}",
        printed_text(&checked)
    );
    let began = Stopwatch::start();
    let words = ["run", &workflow, "--resource-timeout", "5s"];
    let output = world.bafs_command(&words).output()?;
    let printed = printed_text(&output);
    ensure!(output.status.code() == Some(1), "{printed}");
    ensure!(printed.contains(told), "{printed}");
    ensure!(
        printed.contains("home 'hom' of bafs://hom/in is not in the catalog"),
        "{printed}"
    );
    // Its nodes come first; it was 270 s.
    ensure!(
        began.elapsed() < Duration::from_secs(25),
        "{:?}",
        began.elapsed()
    );
    Ok(())
}
