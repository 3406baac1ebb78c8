//! Files of other workflow systems, imported and run on a temporary cluster.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use bafs_tests::{bafs_program, mount_obstacle, printed_text, report_skip};

fn run(directory: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new(bafs_program());
    command
        .args(words)
        .current_dir(directory)
        .env("BAFS_CONFIG", "");
    let output = command.output()?;
    ensure!(
        output.status.success(),
        "bafs {words:?}: {}",
        printed_text(&output)
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// A directory with files, or nothing where jobs cannot run.
fn prepare(test: &str, files: &[(&str, &str)]) -> Result<Option<tempfile::TempDir>> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(None);
    }
    let directory = tempfile::tempdir()?;
    for (name, text) in files {
        let path = directory.path().join(name);
        fs::create_dir_all(path.parent().unwrap_or_else(|| directory.path()))?;
        fs::write(&path, text)?;
        if text.starts_with("#!") {
            let mut chmod = Command::new("chmod");
            ensure!(chmod.arg("+x").arg(&path).status()?.success());
        }
    }
    Ok(Some(directory))
}

#[test]
fn cluster_imported_dag_runs_unchanged() -> Result<()> {
    let files = [
        (
            "split.sh",
            "#!/bin/sh\nhead -n 2 all.txt > a.txt; tail -n 2 all.txt > b.txt\n",
        ),
        ("data/all.txt", "4\n3\n2\n1\n"),
        ("data/words", "# shared\n"),
        (
            "split.sub",
            "executable = split.sh\ntransfer_input_files = data/all.txt\nqueue\n",
        ),
        (
            "sort.sub",
            "executable = /bin/sh\n\
             arguments = \"-c 'cat words $(part).txt | sort > $(part).out'\"\n\
             transfer_input_files = $(part).txt, data/words\n\
             transfer_output_files = $(part).out\nerror = logs/$(part).err\nqueue\n",
        ),
        (
            "join.sub",
            "executable = /bin/cat\narguments = a.out b.out\n\
             transfer_input_files = a.out, b.out\noutput = result.txt\nqueue\n",
        ),
        (
            "w.dag",
            "JOB split split.sub\nJOB A sort.sub\nJOB B sort.sub\nJOB join join.sub\n\
             VARS A part=\"a\"\nVARS B part=\"b\"\nPARENT split CHILD A B\n\
             PARENT A B CHILD join\nRETRY A 1\n",
        ),
    ];
    let Some(directory) = prepare("cluster_imported_dag_runs_unchanged", &files)? else {
        return Ok(());
    };
    let said = run(directory.path(), &["import", "dagman", "w.dag"])?;
    ensure!(said.contains("4 jobs") && said.contains("batch"), "{said}");
    run(directory.path(), &["check", "--local", "w.dag.bafs"])?;
    run(directory.path(), &["run", "w.dag.bafs", "--local", "2"])?;
    let result = fs::read_to_string(directory.path().join("result.txt"))?;
    ensure!(result == "# shared\n3\n4\n# shared\n1\n2\n", "{result}");
    ensure!(
        directory.path().join("logs/a.err").exists(),
        "no standard error"
    );
    ensure!(
        !directory.path().join("a.out").exists(),
        "an intermediate file came home"
    );
    Ok(())
}

#[test]
fn cluster_imported_makeflow_runs_unchanged() -> Result<()> {
    let files = [
        ("in/x", "x\n"),
        ("tool.sh", "#!/bin/sh\ncat \"$1\" \"$1\" > \"$2\"\n"),
        (
            "w.mf",
            "TOOL=./tool.sh\nout/result.txt: y z\n\tcat y z > out/result.txt\n\n\
             y: in/x tool.sh\n\t$TOOL in/x y\n\nz: in/x tool.sh\n\tLOCAL ${TOOL} in/x z\n",
        ),
    ];
    let Some(directory) = prepare("cluster_imported_makeflow_runs_unchanged", &files)? else {
        return Ok(());
    };
    run(
        directory.path(),
        &["import", "makeflow", "w.mf", "-o", "w.bafs"],
    )?;
    run(directory.path(), &["run", "w.bafs", "--local", "2"])?;
    let result = fs::read_to_string(directory.path().join("out/result.txt"))?;
    ensure!(result == "x\nx\nx\nx\n", "{result}");
    Ok(())
}

#[test]
fn cluster_stand_ins_of_an_instance_run() -> Result<()> {
    let instance = r#"{"schemaVersion": "1.5", "workflow": {"specification": {"tasks": [
        {"id": "a", "parents": [], "children": ["b"], "inputFiles": ["in"], "outputFiles": ["m"]},
        {"id": "b", "parents": ["a"], "children": [], "inputFiles": ["m"], "outputFiles": ["out"]}],
        "files": [{"id": "in", "sizeInBytes": 10}, {"id": "m", "sizeInBytes": 3000},
        {"id": "out", "sizeInBytes": 20000}]}, "execution": {"tasks": [
        {"id": "a", "runtimeInSeconds": 12.5, "command": {"program": "none", "arguments": ["x"]}},
        {"id": "b", "runtimeInSeconds": 7.5}]}}}"#;
    let environment = "home-rate = '1 MB/s'\nlocal-rate = '100 MB/s'\n\
                       [[nodes]]\ncount = 2\ncpus = 1\nstorage = '1 GB'\n";
    let files = [
        ("w.json", instance),
        ("in", "0123456789"),
        ("e.toml", environment),
    ];
    let Some(directory) = prepare("cluster_stand_ins_of_an_instance_run", &files)? else {
        return Ok(());
    };
    let words = [
        "import",
        "wfformat",
        "w.json",
        "--stand-in",
        "0.01",
        "--trace",
        "w.csv",
    ];
    run(directory.path(), &words)?;
    run(directory.path(), &["run", "w.json.bafs", "--local", "1"])?;
    ensure!(fs::metadata(directory.path().join("out"))?.len() == 20_000);
    let words = [
        "sim",
        "w.json.bafs",
        "--trace",
        "w.csv",
        "--environment",
        "e.toml",
        "--json",
    ];
    let said = run(
        directory.path(),
        &[&words[..], &["--strategy", "need"]].concat(),
    )?;
    let simulated: serde_json::Value = serde_json::from_str(said.trim())?;
    let seconds = simulated["runs"][0]["simulated_s"].as_f64().unwrap_or(0.0);
    ensure!((20.0..22.0).contains(&seconds), "{said}");
    Ok(())
}
