//! Servers of others as children of the test: started on a free port, gone with the value.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server that ends with this value.
pub(crate) struct Server {
    child: Child,
    /// Where it listens, on 127.0.0.1.
    pub(crate) port: u16,
    _directory: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port that nobody listens at now.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("bound").port()
}

/// Starts `command` and waits until it accepts connections.
fn start(mut command: Command, port: u16, directory: tempfile::TempDir) -> Server {
    let log = std::fs::File::create(directory.path().join("log")).expect("log");
    let errors = log.try_clone().expect("log");
    let child = command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; run `cargo xtask test`"));
    let mut server = Server {
        child,
        port,
        _directory: directory,
    };
    for _ in 0..1_000 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return server;
        }
        if let Ok(Some(status)) = server.child.try_wait() {
            let log = std::fs::read_to_string(server._directory.path().join("log"));
            panic!("{command:?} ended: {status}: {log:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{command:?} does not listen");
}

/// nginx, which shows `root`; below `/private/` to who knows a password.
pub(crate) fn nginx(root: &Path) -> Server {
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let own = directory.path().display();
    let configuration = format!(
        "daemon off; master_process off; pid {own}/pid; error_log stderr;
         events {{ worker_connections 64; }}
         http {{
           access_log {own}/access; default_type application/octet-stream;
           client_body_temp_path {own}/1; proxy_temp_path {own}/2; fastcgi_temp_path {own}/3;
           uwsgi_temp_path {own}/4; scgi_temp_path {own}/5;
           server {{
             listen 127.0.0.1:{port}; root {};
             location /private/ {{ return 403; }}
           }}
         }}",
        root.display()
    );
    let file = directory.path().join("nginx.conf");
    std::fs::write(&file, configuration).expect("configuration");
    let mut command = Command::new("nginx");
    command.arg("-c").arg(&file).arg("-p").arg(directory.path());
    start(command, port, directory)
}

/// s3s-fs with one bucket in `root`, for one key; `None` when it could not be built here, which is
/// announced.
pub(crate) fn s3(test: &str, root: &Path) -> Option<Server> {
    let beside = std::env::current_exe().expect("own path");
    let beside = beside.ancestors().nth(3).map(|it| it.join("tools/bin"));
    let told = std::env::var_os("BAFS_TOOLS").map(PathBuf::from);
    let programs = [told, beside].into_iter().flatten();
    let mut programs = programs.map(|directory| directory.join("s3s-fs"));
    let Some(program) = programs.find(|program| program.is_file()) else {
        skip(test, "there is no s3s-fs; `cargo xtask test` builds it");
        return None;
    };
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let mut command = Command::new(program);
    command
        .args(["--host", "127.0.0.1", "--port", &port.to_string()])
        .args(["--access-key", "key", "--secret-key", "secret"])
        .arg(root);
    Some(start(command, port, directory))
}

fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED: {test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let log = std::fs::File::options().append(true).create(true).open(log);
        let _ = log.and_then(|mut log| log.write_all(line.as_bytes()));
    }
}
