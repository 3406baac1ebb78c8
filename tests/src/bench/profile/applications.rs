//! Unmodified programs in two instances each, the roles of their files by hand, and skeletons of
//! them that run.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::trace_command;
use crate::{bafs_program, printed_text};

/// A pipeline of real programs. `@` stands for the instance.
pub(super) struct Application {
    pub(super) name: &'static str,
    /// Makes all inputs in the working directory; `EXAMPLES` is where the examples are.
    prepare: &'static str,
    instances: [&'static str; 2],
    stages: &'static [&'static [&'static str]],
    /// Each file that the programs use, with its role by their manuals.
    roles: &'static [(&'static str, &'static str)],
    /// Text files that the pipeline ends with.
    results: &'static [&'static str],
}

pub(super) const APPLICATIONS: &[Application] = &[
    Application {
        name: "BWA",
        prepare: "sh $EXAMPLES/bwa/prepare.sh . && mkdir work out",
        instances: ["lane1", "lane2"],
        stages: &[
            &[
                "bwa",
                "mem",
                "-v",
                "1",
                "-o",
                "work/@.sam",
                "reference/genome.fa",
                "lanes/@/r1.fq",
                "lanes/@/r2.fq",
            ],
            &["samtools", "sort", "-o", "out/@.bam", "work/@.sam"],
            &[
                "sh",
                "-c",
                "samtools index out/@.bam && samtools flagstat out/@.bam > out/@.txt",
            ],
        ],
        roles: &[
            ("reference/genome.fa.amb", "batch"),
            ("reference/genome.fa.ann", "batch"),
            ("reference/genome.fa.bwt", "batch"),
            ("reference/genome.fa.pac", "batch"),
            ("reference/genome.fa.sa", "batch"),
            ("lanes/@/r1.fq", "endpoint"),
            ("lanes/@/r2.fq", "endpoint"),
            ("work/@.sam", "pipeline"),
            // A later stage reads it: pipeline data by the thesis' definition.
            ("out/@.bam", "pipeline"),
            ("out/@.bam.bai", "endpoint"),
            ("out/@.txt", "endpoint"),
        ],
        results: &["out/@.txt"],
    },
    Application {
        name: "BLAST",
        prepare: "sh $EXAMPLES/blast/prepare.sh . && mkdir out",
        instances: ["q01", "q02"],
        stages: &[
            &[
                "blastp",
                "-db",
                "db/proteins",
                "-query",
                "queries/@.fa",
                "-out",
                "out/@.raw",
                "-outfmt",
                "6",
                "-evalue",
                "1e-3",
                "-num_threads",
                "1",
            ],
            &[
                "sh",
                "-c",
                "LC_ALL=C sort -k12,12gr -k2,2 out/@.raw | head -n 50 > out/@.txt",
            ],
        ],
        // Version 5 of the data base: index, headers, sequences, and the table of ids. The tables
        // of taxonomy (.pot, .ptf, .pto) serve only searches that name taxa.
        roles: &[
            ("db/proteins.pdb", "batch"),
            ("db/proteins.phr", "batch"),
            ("db/proteins.pin", "batch"),
            ("db/proteins.psq", "batch"),
            ("queries/@.fa", "endpoint"),
            ("out/@.raw", "pipeline"),
            ("out/@.txt", "endpoint"),
        ],
        results: &["out/@.txt"],
    },
    Application {
        name: "HMMER",
        prepare: "sh $EXAMPLES/hmmer/prepare.sh . && mkdir library out && \
                  for f in 1 2 3 4 5 6; do hmmbuild -o /dev/null -n fam$f --cpu 0 \
                  library/$f.hmm families/fam$f.sto; done && \
                  cat library/?.hmm > library/all.hmm && hmmpress library/all.hmm",
        instances: ["part1", "part2"],
        stages: &[
            &[
                "hmmscan",
                "-o",
                "/dev/null",
                "--cpu",
                "0",
                "-E",
                "1e-5",
                "--tblout",
                "out/@.tbl",
                "library/all.hmm",
                "proteins/@.fa",
            ],
            &[
                "sh",
                "-c",
                "grep -v '^#' out/@.tbl | LC_ALL=C sort > out/@.txt",
            ],
        ],
        roles: &[
            ("library/all.hmm", "batch"),
            ("library/all.hmm.h3f", "batch"),
            ("library/all.hmm.h3i", "batch"),
            ("library/all.hmm.h3m", "batch"),
            ("library/all.hmm.h3p", "batch"),
            ("proteins/@.fa", "endpoint"),
            ("out/@.tbl", "pipeline"),
            ("out/@.txt", "endpoint"),
        ],
        results: &["out/@.txt"],
    },
];

/// What was found of an application.
pub(super) struct ApplicationOutcome {
    pub(super) right: usize,
    /// Files of the list, and files that the list lacks.
    pub(super) total: usize,
    pub(super) wrong: Vec<String>,
    pub(super) is_skeleton_running: bool,
}

/// Traces two instances, compares roles, and runs the skeleton on fresh inputs.
pub(super) fn check_application(application: &Application) -> Result<ApplicationOutcome> {
    let place = tempfile::tempdir()?;
    let traced = place.path().join("traced");
    prepare(application, &traced)?;
    let profile = place.path().join("profile");
    let mut report = serde_json::Value::Null;
    for instance in application.instances {
        for stage in application.stages {
            let words: Vec<String> = stage.iter().map(|it| it.replace('@', instance)).collect();
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            report = trace_command(&traced, &profile, instance, &words)?;
        }
    }
    let (right, total, wrong) = compare_roles(application, &traced, &report)?;
    let is_skeleton_running = run_skeleton(application, place.path(), &profile)?;
    Ok(ApplicationOutcome {
        right,
        total,
        wrong,
        is_skeleton_running,
    })
}

fn prepare(application: &Application, directory: &Path) -> Result<()> {
    fs::create_dir(directory)?;
    let output = Command::new("sh")
        .args(["-euc", application.prepare])
        .current_dir(directory)
        .env(
            "EXAMPLES",
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples"),
        )
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    Ok(())
}

fn compare_roles(
    application: &Application,
    directory: &Path,
    report: &serde_json::Value,
) -> Result<(usize, usize, Vec<String>)> {
    let mut expected: BTreeMap<String, &str> = BTreeMap::new();
    for (path, role) in application.roles {
        for instance in application.instances {
            expected.insert(path.replace('@', instance), role);
        }
    }
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    for file in report["files"].as_array().context("a profile has files")? {
        let path = file["path"].as_str().context("a file has a path")?;
        let below = Path::new(path).strip_prefix(directory)?;
        let role = file["role"].as_str().context("a file has a role")?;
        found.insert(below.to_string_lossy().into_owned(), role.to_owned());
    }
    let mut wrong = Vec::new();
    for (path, role) in &expected {
        match found.get(path) {
            Some(other) if other == role => {}
            other => wrong.push(format!("{path}: {role} by hand, {other:?} by the profile")),
        }
    }
    let listed_wrong = wrong.len();
    let more = found
        .iter()
        .filter(|(path, _)| !expected.contains_key(*path));
    wrong.extend(more.map(|(path, role)| format!("{path}: {role}, not in the list")));
    let total = expected.len() + wrong.len() - listed_wrong;
    Ok((total - wrong.len(), total, wrong))
}

/// Runs the skeleton with a home that has the inputs alone.
fn run_skeleton(application: &Application, place: &Path, profile: &Path) -> Result<bool> {
    let (home, skeleton) = (place.join("home"), place.join("skeleton.bafs"));
    prepare(application, &home)?;
    let output = Command::new(bafs_program())
        .args(["profile", "--profile"])
        .arg(profile)
        .arg("--skeleton")
        .arg(&skeleton)
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    let output = Command::new(bafs_program())
        .arg("run")
        .arg(&skeleton)
        .args(["--local", "2", "--node-size", "2GB", "--export"])
        .arg(&home)
        .output()?;
    if !output.status.success() {
        let text = fs::read_to_string(&skeleton)?;
        anyhow::bail!("{}\n{text}", printed_text(&output));
    }
    for instance in application.instances {
        for result in application.results {
            let path = result.replace('@', instance);
            let [one, other] = ["traced", "home"].map(|it| fs::read(place.join(it).join(&path)));
            if one? != other.with_context(|| format!("{path} did not come home"))? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}
