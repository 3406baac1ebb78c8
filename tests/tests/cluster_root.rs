//! Jobs whose whole file system is a volume, and programs that travel to their jobs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_tests::root_image::create_image;
use bafs_tests::{TestCluster, mount_obstacle, printed_text, report_skip};

fn start_cluster(name: &str) -> Result<Option<TestCluster>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    let world = TestCluster::start(&["100MB", "100MB"])?;
    world.wait_for_servers(3)?;
    Ok(Some(world))
}

/// Runs a workflow to its end; the jobs that ran, sorted.
fn run_jobs(world: &TestCluster, workflow: &Path) -> Result<Vec<String>> {
    let path = workflow.to_string_lossy();
    let output = world.bafs_command(&["run", &path, "--json"]).output()?;
    ensure!(output.status.success(), printed_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let jobs = report["jobs"].as_array().context("a report has jobs")?;
    let names = jobs.iter().filter_map(|job| job["name"].as_str());
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort();
    Ok(names)
}

fn write_script(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o755),
    )?)
}

/// `a` and `b` differ in what they read of their root.
fn root_workflow(image: &str) -> String {
    let mut text = format!("volume image cache bafs://home/{image} 60 MB\nroot image a b\n");
    for job in ["a", "b"] {
        text += &format!(
            "volume out-{job} scratch 1 MB files 10\n\
             mount out-{job} {job} /out\n\
             job {job} {{\n\
               script = <<END\n\
                 cat /etc/of-{job}\n\
                 ls / /tmp $HOME > /out/list\n\
                 id -u > /out/id\n\
                 test ! -e /etc/ld.so.cache\n\
                 cat /etc/of-{job} > /out/text\n\
               END\n\
             }}\n\
             extract out-{job} text bafs://home/results/{job}\n\
             extract out-{job} list bafs://home/results/{job}.list\n\
             extract out-{job} id bafs://home/results/{job}.id\n"
        );
    }
    text
}

#[test]
fn cluster_job_sees_only_its_root() -> Result<()> {
    let Some(world) = start_cluster("cluster_job_sees_only_its_root")? else {
        return Ok(());
    };
    let image = world.home.path().join("image");
    create_image(&image, &["cat", "ls", "id"])?;
    for job in ["a", "b"] {
        fs::write(
            image.join("etc").join(format!("of-{job}")),
            format!("{job}1\n"),
        )?;
    }
    let workflow = world.write_workflow(&root_workflow("image"))?;
    ensure!(run_jobs(&world, &workflow)? == ["a", "b"]);
    ensure!(world.read_home("results/a")? == b"a1\n");
    let list = String::from_utf8(world.read_home("results/a.list")?)?;
    let mut expected: Vec<String> = fs::read_dir(&image)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect::<Result<_>>()?;
    expected.push("out".to_owned());
    // Its home is its own, wherever that is.
    let home = std::env::var("HOME").unwrap_or_default();
    expected.extend(home.split('/').nth(1).map(str::to_owned));
    expected.sort();
    expected.dedup();
    let shown: Vec<&str> = list
        .lines()
        .skip(1)
        .take_while(|it| !it.is_empty())
        .collect();
    ensure!(shown == expected, "{list}");
    ensure!(list.contains("\n/tmp:\n"), "/tmp is there: {list}");
    let id = String::from_utf8(world.read_home("results/a.id")?)?;
    ensure!(id.trim() == nix::unistd::getuid().to_string(), "{id}");

    // Nothing changed; then a file that only one job has read.
    ensure!(run_jobs(&world, &workflow)?.is_empty());
    fs::write(image.join("etc/of-b"), "b22\n")?;
    ensure!(run_jobs(&world, &workflow)? == ["b"]);
    ensure!(world.read_home("results/b")? == b"b22\n");
    Ok(())
}

/// An image as `docker save` writes it, with a second layer that removes a file of the first.
const SAVE_IMAGE: &str = "set -eu\n\
    cd $1; mkdir upper; mkdir upper/etc; touch upper/etc/.wh.of-nobody\n\
    tar -C $2 -cf one.tar .; tar -C upper -cf two.tar etc\n\
    one=$(sha256sum one.tar | cut -c1-64); two=$(sha256sum two.tar | cut -c1-64)\n\
    env='{\"config\":{\"Env\":[\"OF=image\"]},\"rootfs\":'\n\
    printf '%s{\"diff_ids\":[\"sha256:%s\",\"sha256:%s\"]}}' \"$env\" $one $two > config\n\
    config=$(sha256sum config | cut -c1-64); mv config $config.json\n\
    layers='\"Layers\":[\"one.tar\",\"two.tar\"]'\n\
    printf '[{\"Config\":\"%s.json\",\"RepoTags\":[\"test:1\"],%s}]' $config \"$layers\" \
      > manifest.json\n\
    tar -cf $3 manifest.json $config.json one.tar two.tar\n";

#[test]
fn cluster_runs_jobs_in_imported_images() -> Result<()> {
    let Some(world) = start_cluster("cluster_runs_jobs_in_imported_images")? else {
        return Ok(());
    };
    let work = tempfile::tempdir()?;
    let (files, archive) = (work.path().join("files"), work.path().join("image.tar"));
    create_image(&files, &["cat", "ls", "id"])?;
    for name in ["of-a", "of-b", "of-nobody"] {
        fs::write(files.join("etc").join(name), format!("{name}\n"))?;
    }
    let parts = work.path().join("parts");
    fs::create_dir(&parts)?;
    let made = Command::new("sh")
        .args(["-c", SAVE_IMAGE, "save"])
        .args([&parts, &files, &archive])
        .output()?;
    ensure!(made.status.success(), printed_text(&made));
    let target = world.home.path().join("imported");
    let (archive, target) = (archive.to_string_lossy(), target.to_string_lossy());
    let imported = world.run_json(&["import", "image", &archive, &target])?;
    ensure!(imported["names"][0] == "test:1", "{imported}");
    ensure!(!world.home.path().join("imported/etc/of-nobody").exists());
    let again = world
        .bafs_command(&["import", "image", &archive, &target])
        .output()?;
    ensure!(!again.status.success(), "it is there already");
    world.run_json(&["import", "image", &archive, &target, "--replace"])?;

    let text = root_workflow("imported").replace("cat /etc/of-a >", "echo $OF >");
    let workflow = world.write_workflow(&text)?;
    ensure!(run_jobs(&world, &workflow)? == ["a", "b"]);
    ensure!(world.read_home("results/a")? == b"image\n");
    Ok(())
}

#[test]
fn cluster_brings_programs_to_their_jobs() -> Result<()> {
    let Some(world) = start_cluster("cluster_brings_programs_to_their_jobs")? else {
        return Ok(());
    };
    fs::create_dir(world.home.path().join("tools"))?;
    write_script(
        &world.home.path().join("tools/greet"),
        "#!/bin/sh\necho hello $1\n",
    )?;
    // No node sees this directory.
    let own = tempfile::tempdir()?;
    write_script(
        &own.path().join("count.sh"),
        "#!/bin/sh\nwc -l < $1 > /out/b\n",
    )?;
    let workflow = own.path().join("w.bafs");
    let job = |name: &str, body: &str| {
        format!(
            "volume {name} scratch 1 MB files 10\nmount {name} {name} /out\n\
             job {name} {{\n{body}\n}}\nextract {name} {name} bafs://home/results/{name}\n"
        )
    };
    let mut text = String::from("program greet from bafs://home/tools/greet 1 MB\n");
    text += &job("a", "script = <<END\ngreet you > /out/a\nEND");
    text += &job("b", "executable = ./count.sh\narguments = /etc/passwd");
    text += &job(
        "c",
        "executable = /bin/sh\narguments = -c 'echo c > /out/c'",
    );
    fs::write(&workflow, &text)?;
    ensure!(run_jobs(&world, &workflow)? == ["a", "b", "c"]);
    ensure!(world.read_home("results/a")? == b"hello you\n");
    let lines = String::from_utf8(world.read_home("results/b")?)?;
    ensure!(lines.trim().parse::<u32>()? > 0, "{lines}");

    ensure!(run_jobs(&world, &workflow)?.is_empty());
    // The home of the last run has left the catalog: the next one waits for nothing.
    let listed = world.run_json(&["servers"])?.to_string();
    ensure!(!listed.contains("programs-"), "{listed}");
    write_script(&own.path().join("count.sh"), "#!/bin/sh\necho 7 > /out/b\n")?;
    ensure!(run_jobs(&world, &workflow)? == ["b"]);
    ensure!(world.read_home("results/b")? == b"7\n");
    write_script(
        &world.home.path().join("tools/greet"),
        "#!/bin/sh\necho goodbye $1\n",
    )?;
    ensure!(run_jobs(&world, &workflow)? == ["a"]);
    ensure!(world.read_home("results/a")? == b"goodbye you\n");
    Ok(())
}

#[test]
fn check_names_programs_without_a_node() -> Result<()> {
    let Some(world) = start_cluster("check_names_programs_without_a_node")? else {
        return Ok(());
    };
    let text = "for i in 1..3\njob a$(i) {\nexecutable = no-such-program\n}\n\
                job b$(i) {\nexecutable = sh\n}\nend\n\
                job c {\nexecutable = /opt/none/tool\n}\n";
    let workflow = world.write_workflow(text)?;
    let checked = world.run_json(&["check", &workflow.to_string_lossy()])?;
    let findings = checked["findings"].as_array().context("findings")?;
    let finding = findings
        .iter()
        .find(|it| it["kind"] == "program_on_no_node")
        .context("a finding")?;
    let places = finding["places"].as_array().context("places")?;
    let places: Vec<_> = places.iter().filter_map(|it| it.as_str()).collect();
    ensure!(
        places == ["/opt/none/tool (job c)", "no-such-program (job a1)"],
        "{checked}"
    );
    ensure!(
        finding["is_error"] == false,
        "nodes may be added: {finding}"
    );
    Ok(())
}
