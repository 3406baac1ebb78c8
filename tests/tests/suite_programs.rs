//! Unmodified programs in a volume and in a plain directory: what they print and the trees they
//! leave are compared. A program that is not installed is named and left out.
#![allow(clippy::print_stdout, reason = "figures are what a suite is run for")]

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Result, ensure};
use bafs_tests::mounted_volume::{DataPath, MountedVolume};
use bafs_tests::{mount_obstacle, printed_text, report_skip};

/// A script that works in an empty directory, prints what must be equal, and may leave files.
struct ProgramCase {
    name: &'static str,
    /// Programs that it cannot do without.
    required_programs: &'static [&'static str],
    script: &'static str,
}

const SHORT_CASES: [ProgramCase; 13] = [
    ProgramCase {
        name: "sqlite3, rollback journal and WAL",
        required_programs: &["sqlite3"],
        script: "for m in delete wal; do sqlite3 $m.db \"pragma journal_mode=$m; \
            create table t(a, b); create index i on t(b); \
            with recursive n(i) as (select 1 union all select i+1 from n where i<20000) \
            insert into t select i, i*7919%10007 from n; delete from t where a%3=0; vacuum; \
            select count(*), sum(b) from t; pragma integrity_check;\"; \
            sqlite3 $m.db .dump | cksum; rm $m.db; done",
    },
    ProgramCase {
        name: "git: commit, branch, merge, gc, fsck, clone",
        required_programs: &["git"],
        script: "export HOME=$PWD GIT_CONFIG_NOSYSTEM=1 GIT_COMMITTER_DATE='2020-01-01 00:00' \
            GIT_AUTHOR_DATE='2020-01-01 00:00'; git config --global user.email a@b.c; \
            git config --global user.name n; git init -q -b main r; cd r; \
            for i in 1 2 3; do seq $i 2000 > f$i; git add .; git commit -qm c$i; done; \
            git checkout -qb side HEAD~1; echo s > s; git add s; git commit -qm s; \
            git checkout -q main; git merge -q --no-edit side; git gc -q --aggressive; \
            git fsck --strict; git clone -q . ../c; git -C ../c log --format=%H; \
            git worktree add -q ../w side; git -C ../w status --short; cd ..; rm -rf r w; \
            rm -r c/.git/logs c/.git/index c/.git/config",
    },
    ProgramCase {
        name: "tar, gzip, xz, cpio of a source tree",
        required_programs: &["tar", "gzip"],
        script: "cp -r \"$SOURCE\" in; chmod -R u=rwX,go= in; ln in/Cargo.toml in/hard; \
            ln -s Cargo.toml in/soft; mkfifo in/fifo; truncate -s 5M in/hole; \
            printf end >> in/hole; find in -exec touch -hd @1000000000 {} +; \
            tar --sort=name --numeric-owner -Scf a.tar in; mkdir out; \
            tar -xpf a.tar -C out; tar -df a.tar -C out && echo equal; \
            gzip -n a.tar; cksum < a.tar.gz; \
            cd out/in; test hard -ef Cargo.toml && readlink soft; \
            test $(du -k hole | cut -f1) -lt 100",
    },
    ProgramCase {
        name: "rsync -aHX",
        required_programs: &["rsync", "setfattr"],
        script: "cp -r \"$SOURCE\" in; ln in/Cargo.toml in/hard; ln -s nothing in/soft; \
            setfattr -n user.origin -v here in/Cargo.toml; rsync -aHX in/ out; \
            rsync -aHXn --delete --itemize-changes in/ out; echo more >> in/Cargo.toml; \
            rm in/soft; \
            touch -d @1000000000 in/Cargo.toml; \
            rsync -aHX --delete --itemize-changes in/ out | grep -v '^.d'; \
            diff -r in out && test out/hard -ef out/Cargo.toml && \
            getfattr --only-values -n user.origin out/hard",
    },
    ProgramCase {
        name: "make -j and a C compiler",
        required_programs: &["make", "cc"],
        script: "for i in $(seq 40); do printf 'int f%d(void) { return %d; }\\n' $i $i > f$i.c; \
            done; \
            { for i in $(seq 40); do echo \"int f$i(void);\"; done; \
            echo '#include <stdio.h>'; echo 'int main(void) { int s = 0;'; \
            for i in $(seq 40); do echo \"s += f$i();\"; done; echo 'printf(\"%d\\n\", s); }'; \
            } > m.c; \
            printf 'p: $(patsubst %%.c,%%.o,$(wildcard *.c))\\n\\tcc -o $@ $^\\n' > Makefile; \
            make -sj4 p; ./p; make -s p; touch f7.c; make -j4 p | wc -l; rm p",
    },
    ProgramCase {
        name: "HDF5: h5import, h5repack, h5diff",
        required_programs: &["h5import", "h5repack", "h5diff", "h5dump"],
        script: "seq 1 10000 > n; printf 'PATH a/b\\nINPUT-CLASS TEXTIN\\nRANK 2\\n\
            DIMENSION-SIZES 100 100\\nOUTPUT-CLASS IN\\nOUTPUT-SIZE 32\\n' > c; \
            h5import n -c c -o a.h5; h5repack -f GZIP=5 -l CHUNK=10x10 a.h5 b.h5; \
            h5diff a.h5 b.h5 && echo same; h5dump -d /a/b b.h5 | tail -n +2 | cksum; rm *.h5",
    },
    ProgramCase {
        name: "NetCDF: ncgen, nccopy, ncdump",
        required_programs: &["ncgen", "nccopy", "ncdump"],
        script: "{ echo 'netcdf a { dimensions: x = 5000 ; variables: int v(x) ; data: v ='; \
            seq -s, 1 5000; echo '; }'; } > a.cdl; ncgen -o a.nc a.cdl; \
            nccopy -k nc4 -d 5 a.nc b.nc; ncdump b.nc | tail -n +2 | cksum; cksum < a.nc; rm b.nc",
    },
    ProgramCase {
        name: "samtools: sort, index, view",
        required_programs: &["samtools"],
        script: "{ printf '@HD\\tVN:1.6\\n@SQ\\tSN:c\\tLN:100000\\n'; \
            awk 'BEGIN { for (i = 1; i <= 5000; \
            i++) printf \"r%d\\t0\\tc\\t%d\\t60\\t10M\\t*\\t0\\t0\\t\
            ACGTACGTAC\\tIIIIIIIIII\\n\", i, (i*7919)%99000+1 }'; } > a.sam; \
            samtools sort --no-PG -m 1M -o a.bam a.sam; samtools index a.bam; \
            samtools view a.bam c:50000-60000 | cksum; samtools flagstat a.bam; cksum < a.bam",
    },
    ProgramCase {
        name: "BLAST: makeblastdb, blastp",
        required_programs: &["makeblastdb", "blastp"],
        script: "cp /usr/share/doc/hmmer/examples/tutorial/globins45.fa g.fa; \
            makeblastdb -in g.fa -dbtype prot -out db > log; \
            blastp -db db -query g.fa -outfmt 6 -evalue 1e-5 -num_threads 2 | cksum; rm log db*",
    },
    ProgramCase {
        name: "sort, split, find, xargs, sed -i, patch",
        required_programs: &["diff", "patch"],
        script: "seq 200000 | awk '{ print ($1 * 7919) % 200003 }' > n; sort -n -S 1M -T . n > s; \
            cksum < s; split -n l/50 s p.; cat p.* | cmp - s && echo same; \
            find . -name 'p.*' | sort | xargs sed -i 's/7/seven/'; cat p.* | cksum; \
            cp s t; sed -i 5d t; diff -u s t > d || true; patch -s s d; cmp s t && echo patched; \
            rm d",
    },
    ProgramCase {
        name: "python: zipfile, dbm, mmap, copytree",
        required_programs: &["python3"],
        script: "python3 - <<'E'\nimport zipfile, dbm.dumb, tempfile, shutil, mmap, pickle, os\n\
            with zipfile.ZipFile('a.zip', 'w') as z:\n for i in range(50): z.writestr(f'f{i}', \
            'x' * i)\n\
            with zipfile.ZipFile('a.zip') as z: z.extractall('z')\n\
            with tempfile.TemporaryFile(dir='.') as t: t.write(b'gone')\n\
            with dbm.dumb.open('d') as d: d['k'] = b'v'\n\
            with open('m', 'w+b') as f:\n f.truncate(1 << 20)\n m = mmap.mmap(f.fileno(), 0)\n\
            \x20m[:] = b'q' * (1 << 20); m.flush()\n\
            shutil.copytree('z', 'y'); os.replace('y/f3', 'z/f3'); \
            print(sorted(os.listdir('y'))[:5])\nE\n\
            rm a.zip; cksum < m",
    },
    ProgramCase {
        name: "cargo: build, run, build again",
        required_programs: &["cargo", "cc"],
        script: "export CARGO_TARGET_DIR=$PWD/target; cargo new -q --vcs none --name p p; cd p; \
            cargo build -q --offline; ../target/debug/p; \
            echo 'fn main() { println!(\"again\"); }' > src/main.rs; touch src/main.rs; \
            cargo run -q --offline; rm -r ../target",
    },
    ProgramCase {
        name: "pip install, over it again, and import",
        required_programs: &["python3", "pip3"],
        script: "python3 - <<'E'\nimport zipfile\n\
            with zipfile.ZipFile('demo-1.0-py3-none-any.whl', 'w') as z:\n\
            \x20for i in range(200): z.writestr(f'demo/m{i}.py', f'n = {i}\\n')\n\
            \x20z.writestr('demo/__init__.py', 'from . import m7, m199\\n')\n\
            \x20d = 'demo-1.0.dist-info/'\n\
            \x20z.writestr(d + 'METADATA', 'Metadata-Version: 2.1\\nName: demo\\n\
            Version: 1.0\\n')\n\
            \x20z.writestr(d + 'WHEEL', 'Wheel-Version: 1.0\\nGenerator: t\\n\
            Root-Is-Purelib: true\\nTag: py3-none-any\\n')\n\
            \x20z.writestr(d + 'RECORD', '')\nE\n\
            export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore; \
            for i in 1 2; do pip3 install -q --no-index --no-cache-dir --upgrade --target t *.whl; \
            done; PYTHONPATH=t python3 -c 'import demo; print(demo.m7.n + demo.m199.n)'; \
            PYTHONPATH=t pip3 list --path t; find t -name __pycache__ | xargs rm -r; \
            rm *.whl t/*/direct_url.json t/*/RECORD",
    },
];

const LONG_CASES: [ProgramCase; 2] = [
    ProgramCase {
        name: "cargo: test, and build for release",
        required_programs: &["cargo", "cc"],
        script: "export CARGO_TARGET_DIR=$PWD/target; cargo new -q --vcs none --name p p; cd p; \
            mkdir tests; echo '#[test] fn t() { assert_eq!(1, 1); }' > tests/t.rs; \
            cargo test -q --offline 2>&1 | grep -c passed; \
            cargo build -q --offline --release; ../target/release/p; rm -r ../target",
    },
    ProgramCase {
        name: "bonnie-like: many files, twice",
        required_programs: &["tar"],
        script: "mkdir many; cd many; seq 20000 | xargs touch; ls | wc -l; ls -U | sort | cksum; \
            seq 1 2 20000 | xargs rm; ls | wc -l; find . -type f | wc -l; cd ..; rm -r many; ls",
    },
];

fn compare_with_directory(test: &str, works: &[ProgramCase], ways: &[DataPath]) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let mut rows = Vec::new();
    for &way in ways {
        for work in works {
            let has = |program: &&str| {
                let found = Command::new("sh")
                    .args(["-c", "command -v $0", program])
                    .output();
                found.is_ok_and(|output| output.status.success())
            };
            if let Some(missing) = work.required_programs.iter().find(|program| !has(program)) {
                rows.push(format!("{:48} {way:?}: not run: no {missing}", work.name));
                continue;
            }
            let (stand, plain) = (MountedVolume::start(way)?, tempfile::tempdir()?);
            let there = stand.create_directory("w")?;
            let here = plain.path().join("w");
            fs::create_dir(&here)?;
            fs::set_permissions(&here, fs::metadata(&there)?.permissions())?;
            let (found, expected) = (run_case(work, &there)?, run_case(work, &here)?);
            let row = |what: &str| format!("{:48} {way:?}: identical: {what}", work.name);
            if found == expected {
                rows.push(row("yes"));
            } else {
                rows.push(row(&format!("NO: {found} is not {expected}")));
            }
        }
    }
    println!("{}", rows.join("\n"));
    let differs = rows.iter().filter(|row| row.contains("identical: NO"));
    ensure!(differs.count() == 0, "{}", rows.join("\n"));
    Ok(())
}

/// Runs a script in a directory; what it printed, and the tree it left.
fn run_case(work: &ProgramCase, directory: &Path) -> Result<String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("bash")
        .args(["-ec", work.script])
        .current_dir(directory)
        .env("SOURCE", source)
        .env("LC_ALL", "C")
        .output()?;
    ensure!(
        output.status.success(),
        "{}: {}",
        work.name,
        printed_text(&output)
    );
    // Names, types, sizes, modes and contents; times and numbers differ between any two trees.
    let list = "find . ! -type d -printf '%P %y %s %m %n %l\\n' | sort; \
        find . -type d -printf '%P %m\\n' | sort; \
        find . -type f -print0 | sort -z | xargs -0 -r cksum";
    let tree = Command::new("bash")
        .args(["-ec", list])
        .current_dir(directory)
        .output()?;
    ensure!(
        tree.status.success(),
        "{}: {}",
        work.name,
        printed_text(&tree)
    );
    let text = |output: &std::process::Output| String::from_utf8_lossy(&output.stdout).into_owned();
    let printed = text(&output).replace(&*directory.to_string_lossy(), "HERE");
    Ok(printed + &text(&tree))
}

#[test]
fn mount_gives_programs_the_same_results() -> Result<()> {
    let name = "mount_gives_programs_the_same_results";
    compare_with_directory(name, &SHORT_CASES, &[DataPath::AgentProcess])
}

#[test]
#[ignore = "long: `cargo xtask soak` runs it"]
fn mount_gives_more_programs_the_same_results() -> Result<()> {
    let name = "mount_gives_more_programs_the_same_results";
    compare_with_directory(name, &SHORT_CASES, &[DataPath::Inline, DataPath::Uncached])?;
    compare_with_directory(name, &LONG_CASES, &DataPath::ALL)
}
