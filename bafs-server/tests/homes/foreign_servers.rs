//! Servers of others as children of the test: started on a free port, gone with the value.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A server that ends with this value.
pub(crate) struct ForeignServer {
    child: Child,
    /// Where it listens, on 127.0.0.1.
    pub(crate) port: u16,
    _directory: tempfile::TempDir,
}

impl Drop for ForeignServer {
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
fn start(mut command: Command, port: u16, directory: tempfile::TempDir) -> ForeignServer {
    let log = std::fs::File::create(directory.path().join("log")).expect("log");
    let errors = log.try_clone().expect("log");
    let child = command
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(errors)
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}; run `cargo xtask test`"));
    let mut server = ForeignServer {
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
pub(crate) fn nginx(root: &Path) -> ForeignServer {
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
             location /private/ {{ auth_basic x; auth_basic_user_file {own}/users; }}
             location /closed/ {{ return 403; }}
             location /bearer/ {{
               if ($http_authorization != \"Bearer sesame\") {{ return 401; }}
             }}
           }}
         }}",
        root.display()
    );
    std::fs::write(directory.path().join("users"), "me:{PLAIN}hush\n").expect("users");
    let file = directory.path().join("nginx.conf");
    std::fs::write(&file, configuration).expect("configuration");
    let mut command = Command::new("nginx");
    command.arg("-c").arg(&file).arg("-p").arg(directory.path());
    start(command, port, directory)
}

/// s3s-fs with one bucket in `root`, for who has this key and secret, or for everybody; `None` when
/// it could not be built here, which is announced.
pub(crate) fn s3(test: &str, root: &Path, login: Option<(&str, &str)>) -> Option<ForeignServer> {
    let beside = std::env::current_exe().expect("own path");
    let beside = beside.ancestors().nth(3).map(|it| it.join("tools/bin"));
    let told = std::env::var_os("BAFS_TOOLS").map(PathBuf::from);
    let programs = [told, beside].into_iter().flatten();
    let mut programs = programs.map(|directory| directory.join("s3s-fs"));
    let Some(program) = programs.find(|program| program.is_file()) else {
        print_skip(test, "there is no s3s-fs; `cargo xtask test` builds it");
        return None;
    };
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let mut command = Command::new(program);
    command.args(["--host", "127.0.0.1", "--port", &port.to_string()]);
    if let Some((key, secret)) = login {
        command.args(["--access-key", key, "--secret-key", secret]);
    }
    command.arg(root);
    Some(start(command, port, directory))
}

fn print_skip(test: &str, reason: &str) {
    let line = format!("SKIPPED: {test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let log = std::fs::File::options().append(true).create(true).open(log);
        let _ = log.and_then(|mut log| log.write_all(line.as_bytes()));
    }
}

/// sshd on a port of its own, for root by a key of this test.
pub(crate) struct SshServer {
    pub(crate) server: ForeignServer,
    keys: tempfile::TempDir,
}

impl SshServer {
    /// The lines of `homes.toml` for it.
    pub(crate) fn settings(&self, key: &str) -> String {
        self.settings_at(self.server.port, key)
    }

    /// The same where another port leads to it.
    pub(crate) fn settings_at(&self, port: u16, key: &str) -> String {
        let keys = self.keys.path().display();
        format!(
            "[[home]]\nurl = \"sftp://127.0.0.1:{port}\"\nuser = \"{}\"\nkey = \"{keys}/{key}\"\n\
             known_hosts = \"{keys}/known\"\n",
            user()
        )
    }
}

fn user() -> String {
    let output = Command::new("id").arg("-un").output().expect("id");
    String::from_utf8(output.stdout)
        .expect("text")
        .trim()
        .to_owned()
}

/// OpenSSH's server; its host key is known, and `key` but not `other` opens it.
pub(crate) fn sshd() -> SshServer {
    let (directory, keys) = (tempfile::tempdir(), tempfile::tempdir());
    let (directory, keys) = (directory.expect("directory"), keys.expect("directory"));
    let port = free_port();
    let at = |name: &str| keys.path().join(name);
    for name in ["host", "key", "other"] {
        let made = Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(at(name))
            .status();
        assert!(made.expect("ssh-keygen").success());
    }
    std::fs::copy(at("key.pub"), at("authorized")).expect("key");
    let host = std::fs::read_to_string(at("host.pub")).expect("key");
    std::fs::write(at("known"), format!("[127.0.0.1]:* {host}")).expect("known hosts");
    let configuration = format!(
        "Port {port}\nListenAddress 127.0.0.1\nHostKey {}\nAuthorizedKeysFile {}\n\
         StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\n\
         PasswordAuthentication no\nSubsystem sftp internal-sftp\n",
        at("host").display(),
        at("authorized").display()
    );
    std::fs::write(at("sshd_config"), configuration).expect("configuration");
    // It separates privileges in a directory that its package makes when the machine starts.
    let _ = std::fs::create_dir_all("/run/sshd");
    let mut command = Command::new("/usr/sbin/sshd");
    command.args(["-D", "-e", "-f"]).arg(at("sshd_config"));
    let server = start(command, port, directory);
    SshServer { server, keys }
}

/// vsftpd, which shows `root` to nobody but the anonymous, who may read; without MLSD.
pub(crate) fn vsftpd(root: &Path) -> ForeignServer {
    start_vsftpd(root, "")
}

fn start_vsftpd(root: &Path, more: &str) -> ForeignServer {
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let configuration = format!(
        "listen=YES\nlisten_address=127.0.0.1\nlisten_port={port}\nbackground=NO\n\
         anonymous_enable=YES\nlocal_enable=NO\nanon_root={}\nno_anon_password=YES\n\
         pasv_address=127.0.0.1\nseccomp_sandbox=NO\nuse_localtime=NO\n\
         secure_chroot_dir={}\n{more}",
        root.display(),
        directory.path().display()
    );
    let file = directory.path().join("vsftpd.conf");
    std::fs::write(&file, configuration).expect("configuration");
    let mut command = Command::new("vsftpd");
    command.arg(&file);
    start(command, port, directory)
}

/// pyftpdlib, which shows `root` to `me` with the password `hush`; the anonymous are refused.
pub(crate) fn pyftpdlib(root: &Path) -> ForeignServer {
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let mut command = Command::new("/usr/bin/python3");
    command
        .args([
            "-m",
            "pyftpdlib",
            "-i",
            "127.0.0.1",
            "-p",
            &port.to_string(),
            "-w",
        ])
        .args(["-u", "me", "-P", "hush", "-d"])
        .arg(root);
    start(command, port, directory)
}

/// What makes pyftpdlib refuse to restart an upload, as ProFTPD does.
const NO_RESTART: &str = "
import sys
from pyftpdlib import authorizers, handlers, servers
class Handler(handlers.FTPHandler):
    def ftp_STOR(self, file, mode='w'):
        if mode == 'w' and self._restart_position:
            self._restart_position = 0
            self.respond('451 Append/Restart not permitted, try again.')
        else:
            return super().ftp_STOR(file, mode)
Handler.authorizer = authorizers.DummyAuthorizer()
Handler.authorizer.add_user('me', 'hush', sys.argv[2], perm='elradfmwMT')
servers.FTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
";

/// As [`pyftpdlib`], but no upload can be restarted.
pub(crate) fn pyftpdlib_without_restart(root: &Path) -> ForeignServer {
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-c", NO_RESTART, &port.to_string()])
        .arg(root);
    start(command, port, directory)
}

/// A certificate for 127.0.0.1 and its key, in one file, and the certificate alone.
pub(crate) struct ServerCertificate {
    directory: tempfile::TempDir,
}

impl ServerCertificate {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().expect("directory");
        let at = |name: &str| directory.path().join(name);
        let configuration = "[req]\ndistinguished_name = dn\nx509_extensions = ext\nprompt = no\n\
            [dn]\nCN = 127.0.0.1\n\
            [ext]\nsubjectAltName = IP:127.0.0.1\nbasicConstraints = critical,CA:FALSE\n";
        std::fs::write(at("openssl.cnf"), configuration).expect("configuration");
        let mut command = Command::new("openssl");
        command
            .args([
                "req", "-x509", "-nodes", "-days", "2", "-newkey", "rsa:2048",
            ])
            .arg("-config")
            .arg(at("openssl.cnf"))
            .arg("-keyout")
            .arg(at("key.pem"))
            .arg("-out")
            .arg(at("certificate.pem"));
        let made = command.output().expect("openssl");
        assert!(made.status.success(), "{made:?}");
        let read = |name: &str| std::fs::read_to_string(at(name)).expect("a file");
        let both = read("key.pem") + &read("certificate.pem");
        std::fs::write(at("both.pem"), both).expect("a file");
        Self { directory }
    }

    /// What a client trusts.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.directory.path().join("certificate.pem")
    }

    fn with_key(&self) -> PathBuf {
        self.directory.path().join("both.pem")
    }
}

/// pyftpdlib that demands TLS for commands and data.
const DEMANDS_TLS: &str = "
import sys
from pyftpdlib import authorizers, handlers, servers
class Handler(handlers.TLS_FTPHandler):
    certfile = sys.argv[3]
    tls_control_required = True
    tls_data_required = True
Handler.authorizer = authorizers.DummyAuthorizer()
Handler.authorizer.add_user('me', 'hush', sys.argv[2], perm='elradfmwMT')
servers.FTPServer(('127.0.0.1', int(sys.argv[1])), Handler).serve_forever()
";

/// As [`pyftpdlib`], over TLS alone.
pub(crate) fn pyftpdlib_with_tls(root: &Path, certificate: &ServerCertificate) -> ForeignServer {
    let (directory, port) = (tempfile::tempdir().expect("directory"), free_port());
    let mut command = Command::new("/usr/bin/python3");
    command
        .args(["-c", DEMANDS_TLS, &port.to_string()])
        .arg(root)
        .arg(certificate.with_key());
    start(command, port, directory)
}

/// As [`vsftpd`], over TLS alone; data connections must resume the session of the commands.
pub(crate) fn vsftpd_with_tls(root: &Path, certificate: &ServerCertificate) -> ForeignServer {
    let more = format!(
        "ssl_enable=YES\nallow_anon_ssl=YES\nforce_anon_logins_ssl=YES\nforce_anon_data_ssl=YES\n\
         require_ssl_reuse=YES\nrsa_cert_file={}\n",
        certificate.with_key().display()
    );
    start_vsftpd(root, &more)
}
