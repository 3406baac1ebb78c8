//! Programs as people run them, in a directory: unpacking an archive, git, a compiler, sqlite,
//! removing a tree. Each is timed by the shell in which it runs.

use std::path::Path;

use anyhow::{Context, Result};

use crate::bench::measure::Samples;
use crate::bench::shell::Shell;

/// A program, and what must be there before it starts: shell lines. `$D` is the directory, `$I`
/// that of the inputs.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProgramWork {
    /// Name in tables and figures.
    pub(super) name: &'static str,
    before: &'static str,
    timed: &'static str,
}

/// In an order in which each finds its input.
pub(super) const PROGRAMS: [ProgramWork; 6] = [
    ProgramWork {
        name: "untar",
        before: "rm -rf $D/tree; mkdir -p $D/tree",
        timed: "tar xf $I/tree.tar -C $D/tree",
    },
    ProgramWork {
        name: "git-clone",
        before: "rm -rf $D/clone",
        timed: "git clone -q --no-hardlinks $I/repository $D/clone",
    },
    ProgramWork {
        name: "git-status-cold",
        before: "sync; echo 3 > /proc/sys/vm/drop_caches",
        timed: "git -C $D/clone status --porcelain",
    },
    ProgramWork {
        name: "make",
        before: "rm -rf $D/program; cp -r $I/program $D/program",
        timed: "make -s -j2 -C $D/program",
    },
    ProgramWork {
        name: "sqlite",
        before: "rm -f $D/database*",
        timed: "sqlite3 $D/database < $I/inserts.sql",
    },
    ProgramWork {
        name: "rm-rf",
        before: "true",
        timed: "rm -rf $D/tree",
    },
];

/// Makes the inputs: trees of so many small files, a program of 24 files, 200 transactions.
const INPUTS: &str = "set -e
mkdir -p $I/work $I/program; cd $I/work
for d in $(seq $DIRECTORIES); do
    mkdir d$d
    for f in $(seq 40); do head -c $((f * 97)) /dev/zero | tr '\\0' $((f % 10)) > d$d/f$f; done
done
tar cf $I/tree.tar .
git init -q $I/repository
cp -r . $I/repository/
cd $I/repository
git add . && git -c user.name=bench -c user.email=bench@localhost commit -q -m all
cd $I/program
for f in $(seq 24); do echo \"int f$f(int x) { return x * $f; }\" > f$f.c; done
echo 'int main(void) { return 0; }' > main.c
printf 'program: $(patsubst %%.c,%%.o,$(wildcard *.c))\\n\\tcc -o $@ $^\\n' > Makefile
echo 'create table t (a integer, b text);' > $I/inserts.sql
for n in $(seq 200); do echo \"insert into t values ($n, 'row $n');\"; done >> $I/inserts.sql
echo made";

/// Makes the inputs in a directory of the host.
pub(super) fn make_inputs(inputs: &Path, directories: u64) -> Result<()> {
    let inputs = inputs.to_str().context("a temporary path is text")?;
    let mut shell = Shell::start_on_host()?;
    let line = format!("(I={inputs}; DIRECTORIES={directories}; {INPUTS}) 2>&1");
    let said = shell.run_line(&line)?;
    anyhow::ensure!(said.trim().ends_with("made"), "inputs: {said}");
    Ok(())
}

/// Runs a program in a directory of a shell, until its file system has all of it: 1 / seconds.
pub(super) fn measure_program(
    shell: &mut Shell,
    work: ProgramWork,
    directory: &str,
    inputs: &str,
) -> Result<f64> {
    let ProgramWork {
        name,
        before,
        timed,
    } = work;
    let line = format!(
        "D={directory}; I={inputs}; {before}; start=$(date +%s%N); \
         {timed} >/dev/null && stat -f $D >/dev/null && echo $(($(date +%s%N) - start))"
    );
    let said = shell.run_line(&line)?;
    let ns: f64 = said
        .trim()
        .parse()
        .with_context(|| format!("{name}: {said}"))?;
    Ok(1e9 / ns)
}

/// The least of the medians of some ratios.
pub(super) fn min_median<'s>(ratios: impl Iterator<Item = &'s Samples>) -> f64 {
    ratios.map(Samples::median).fold(f64::INFINITY, f64::min)
}
