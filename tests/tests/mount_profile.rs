//! `bafs profile` on real programs: each call and each mapped page is counted, and a traced
//! directory behaves as the directory itself.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use bafs_tests::{bafs_program, mount_obstacle, printed_text, report_skip};

fn profile(directory: &Path, arguments: &[&str], words: &[&str]) -> Result<Output> {
    let mut command = Command::new(bafs_program());
    command
        .current_dir(directory)
        .args(["profile", "--json"])
        .args(arguments);
    if !words.is_empty() {
        command.arg("--").args(words);
    }
    Ok(command.output()?)
}

/// Traces a command as the first one of a new profile.
fn trace(directory: &Path, words: &[&str]) -> Result<serde_json::Value> {
    let output = profile(directory, &["--new"], words)?;
    ensure!(output.status.success(), printed_text(&output));
    serde_json::from_slice(&output.stdout).context("a profile is JSON")
}

/// A directory below `/tmp`, unless nothing can be mounted here.
fn make_directory(name: &str) -> Result<Option<tempfile::TempDir>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(None);
    }
    Ok(Some(tempfile::tempdir()?))
}

#[test]
fn profile_counts_each_call() -> Result<()> {
    let Some(place) = make_directory("profile_counts_each_call")? else {
        return Ok(());
    };
    fs::write(place.path().join("in"), vec![1; 70_000])?;
    let words = [
        "dd",
        "if=in",
        "of=out",
        "bs=1000",
        "count=50",
        "status=none",
    ];
    let report = trace(place.path(), &words)?;
    let traffic = &report["rows"][0]["traffic"];
    ensure!(traffic["operations"]["read"] == 50, "{traffic}");
    ensure!(traffic["operations"]["write"] == 50, "{traffic}");
    ensure!(traffic["reads"]["unique_bytes"] == 50_000, "{traffic}");
    ensure!(traffic["reads"]["static_bytes"] == 70_000, "{traffic}");
    ensure!(traffic["writes"]["traffic_bytes"] == 50_000, "{traffic}");
    ensure!(
        fs::read(place.path().join("out"))?.len() == 50_000,
        "{traffic}"
    );
    Ok(())
}

#[test]
fn profile_counts_mapped_pages() -> Result<()> {
    let Some(place) = make_directory("profile_counts_mapped_pages")? else {
        return Ok(());
    };
    fs::write(place.path().join("in"), vec![1; 1 << 20])?;
    let program = "import mmap\nwith open('in', 'rb') as file:\n    \
                   pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n    \
                   sum(pages[at * 8192] for at in range(100))\n";
    let report = trace(place.path(), &["python3", "-c", program])?;
    let reads = &report["rows"][0]["traffic"];
    ensure!(reads["operations"]["read"] == 100, "{reads}");
    ensure!(reads["operations"]["seek"] == 99, "{reads}");
    ensure!(reads["reads"]["unique_bytes"] == 409_600, "{reads}");
    Ok(())
}

#[test]
fn traced_directories_behave_as_themselves() -> Result<()> {
    let Some(place) = make_directory("traced_directories_behave_as_themselves")? else {
        return Ok(());
    };
    let script = "set -eu; umask 027; mkdir -p a/b c; echo one > a/b/f; echo two >> a/b/f; \
        mv a/b c/d; ln -s d/f c/link; ln c/d/f c/hard; cat c/link > copy; cp -r c e; \
        exec 3<> copy; rm copy; echo more >&3; cat /proc/self/fd/3 > gone; exec 3>&-; \
        chmod 640 c/hard; touch -d 2001-01-01 gone; truncate -s 5 gone; \
        tar cf all.tar c e; mkdir x; tar xf all.tar -C x; rm -r e; \
        printf 'b\\na\\n' | sort -o sorted; mv sorted c/d/f; rmdir a; \
        find . -printf '%P %y %m %s %l\\n' | sort > /dev/stderr; cat gone c/d/f >&2";
    let mut seen = Vec::new();
    for name in ["native", "traced"] {
        let directory = place.path().join(name);
        fs::create_dir(&directory)?;
        let output = match name {
            "native" => Command::new("sh")
                .args(["-c", script])
                .current_dir(&directory)
                .output()?,
            _ => profile(&directory, &["--profile", "../p"], &["sh", "-c", script])?,
        };
        ensure!(output.status.success(), printed_text(&output));
        let text = String::from_utf8(output.stderr)?;
        // The sizes of directories are the file system's own.
        let lines = text.lines().filter(|line| !line.contains(" d "));
        seen.push(lines.map(str::to_owned).collect::<Vec<_>>());
    }
    ensure!(seen[0].len() > 10, "{seen:?}");
    ensure!(seen[0] == seen[1], "{seen:#?}");
    Ok(())
}

#[test]
fn profile_ends_with_the_code_of_its_command() -> Result<()> {
    let Some(place) = make_directory("profile_ends_with_the_code_of_its_command")? else {
        return Ok(());
    };
    let output = profile(place.path(), &[], &["sh", "-c", "exit 7"])?;
    ensure!(output.status.code() == Some(7), printed_text(&output));
    let output = profile(place.path(), &[], &["no-such-program"])?;
    ensure!(output.status.code() == Some(1), printed_text(&output));
    Ok(())
}

#[test]
fn workflows_are_profiled_by_pipeline() -> Result<()> {
    let Some(place) = make_directory("workflows_are_profiled_by_pipeline")? else {
        return Ok(());
    };
    let text = "volume db cache bafs://home/db 1 MB\nfor i in 1..2\nvolume w$(i) scratch 1 MB\n\
        job a$(i) {\nexecutable = sh\narguments = -c 'cat /db/x > /w/raw'\n}\n\
        job b$(i) {\nexecutable = cp\narguments = /w/raw /w/out\n}\nmount db a$(i) /db\n\
        mount w$(i) a$(i) /w\nmount w$(i) b$(i) /w\nparent a$(i) child b$(i)\n\
        extract w$(i) out bafs://home/out$(i)\nend\n";
    fs::create_dir(place.path().join("db"))?;
    fs::write(place.path().join("db/x"), "data")?;
    fs::write(place.path().join("w.bafs"), text)?;
    let output = profile(place.path(), &["w.bafs"], &[])?;
    ensure!(output.status.success(), printed_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let files = report["files"].as_array().context("there are files")?;
    let roles: Vec<String> = files
        .iter()
        .map(|file| format!("{} {}", file["path"], file["role"]).replace('"', ""))
        .collect();
    let expected = [
        "db/x batch",
        "w1/out endpoint",
        "w1/raw pipeline",
        "w2/out endpoint",
        "w2/raw pipeline",
    ];
    ensure!(roles == expected, "{roles:?}");
    ensure!(
        report["instances"] == serde_json::json!(["a1", "a2"]),
        "{report}"
    );
    ensure!(
        report["canonical"]["conditions"][0]["distance"] == 0.0,
        "{report}"
    );
    Ok(())
}
