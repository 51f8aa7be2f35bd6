//! `slackwater populators`: the controller that fills the volumes of claims that name a data source.

use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;

use clap::Args;

use super::{Failure, block_on};
use crate::config::{BadConfig, DriverName, one_line};
use crate::error::chain;
use crate::model::size::parse_size;
use crate::router::connect;
use crate::router::populators::{Limits, PopulatorOptions, Populators, Settings};
use crate::server;
use crate::telemetry::{self, LogFormat, Metrics, http};
use crate::tls;

/// The arguments of the command.
#[derive(Debug, Args)]
pub(super) struct Arguments {
    /// Name of the driver whose claims are filled
    #[arg(long, value_name = "NAME", default_value = "csi.slackwater.dev")]
    driver_name: DriverName,
    /// Image of slackwater-populate, with its digest
    #[arg(long, value_name = "NAME@sha256:DIGEST")]
    image: ImageByDigest,
    /// Namespace of the controller
    #[arg(long, value_name = "NAMESPACE")]
    namespace: String,
    /// Service account of the controller, for advice [default: NAMESPACE:slackwater-populators]
    #[arg(long, value_name = "NAMESPACE:NAME")]
    account: Option<String>,
    /// ClusterRole that owners of namespaces bind, for advice
    #[arg(
        long,
        value_name = "NAME",
        default_value = "slackwater-populators-namespace"
    )]
    role: String,
    /// Refuse servers in private networks
    #[arg(long)]
    refuse_private_networks: bool,
    /// Proxy for all connections of the pods, as http://HOST:PORT
    #[arg(long, value_name = "URL")]
    proxy: Option<Proxy>,
    /// Certificates in PEM that the pods trust, besides those of their image
    #[arg(long, value_name = "PEM")]
    ca_bundle: Option<String>,
    /// Address or network that no source may lead to, besides those of the API server (may be repeated)
    #[arg(long, value_name = "ADDRESS[/BITS]")]
    refuse: Vec<Network>,
    /// Largest qcow2 image that a block volume is filled from
    #[arg(long, value_name = "SIZE", default_value = "20Gi", value_parser = size)]
    scratch_size: String,
    /// Run pods that fill block volumes as root without capabilities
    #[arg(long)]
    root_for_block: bool,
    /// VolumeSnapshotClass of the snapshots that keep the content of sources with a cache
    #[arg(long, value_name = "NAME")]
    cache_class: Option<String>,
    /// Most of these snapshots in a namespace
    #[arg(
        long,
        value_name = "NUMBER",
        default_value_t = 16,
        requires = "cache_class"
    )]
    cache_snapshots: usize,
    /// Most pods that fill volumes at the same time
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = number)]
    max_pods: usize,
    /// Most of these pods in a namespace
    #[arg(long, value_name = "NUMBER", default_value_t = 4, value_parser = number)]
    max_pods_per_namespace: usize,
    /// Address of /metrics, /healthz and /readyz
    #[arg(long, value_name = "IP:PORT")]
    metrics_address: Option<SocketAddr>,
    /// Log format: text or json [default: text]
    #[arg(long, value_name = "FORMAT")]
    log_format: Option<LogFormat>,
}

/// The name of an image that cannot change.
#[derive(Clone, Debug)]
struct ImageByDigest(String);

impl FromStr for ImageByDigest {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<ImageByDigest, BadConfig> {
        let digest = text.rsplit_once("@sha256:").map(|(_, digits)| digits);
        let is_hexadecimal = |c: char| matches!(c, '0'..='9' | 'a'..='f');
        match digest {
            Some(digits) if digits.len() == 64 && digits.chars().all(is_hexadecimal) => {
                Ok(ImageByDigest(text.into()))
            }
            _ => Err(BadConfig(format!(
                "{text:?} does not end with @sha256: and 64 hexadecimal digits"
            ))),
        }
    }
}

#[derive(Clone, Debug)]
struct Proxy(String);

impl FromStr for Proxy {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Proxy, BadConfig> {
        let place = text
            .strip_prefix("http://")
            .map(|rest| rest.trim_end_matches('/'));
        let is_place = place.is_some_and(|place| {
            let port = place.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
            matches!(port, Some(Ok(_))) && !place.contains(['/', '@', '?', '#'])
        });
        match is_place {
            true => Ok(Proxy(text.into())),
            false => Err(BadConfig(format!("{text:?} is not http://HOST:PORT"))),
        }
    }
}

/// The most bytes of certificates in a pod. A variable of a process has at most 128 KiB.
const MAX_CA_BUNDLE_BYTES: usize = 64 << 10;

/// The certificates of `--ca-bundle`, without the comments and keys that a bundle may have: all users of
/// a namespace can read the pod. The command line's own parser would show a bundle that it refuses.
fn ca_bundle(text: &str) -> Result<String, BadConfig> {
    let found = tls::authorities(text, "--ca-bundle")
        .map_err(|error| BadConfig(one_line(&chain(&error))))?;
    match found.len() <= MAX_CA_BUNDLE_BYTES {
        true => Ok(found),
        false => Err(BadConfig(format!(
            "--ca-bundle has more than {MAX_CA_BUNDLE_BYTES} bytes of certificates; those of public authorities are in the image"
        ))),
    }
}

/// An address, or a network with its prefix length.
#[derive(Clone, Debug)]
struct Network(String);

impl FromStr for Network {
    type Err = BadConfig;

    fn from_str(text: &str) -> Result<Network, BadConfig> {
        let (address, bits) = text.split_once('/').unwrap_or((text, "0"));
        let address = address.parse::<IpAddr>().ok();
        let most = address.map_or(0, |address| if address.is_ipv4() { 32 } else { 128 });
        let is_prefix = bits.parse::<u8>().is_ok_and(|bits| bits <= most);
        match address.is_some() && is_prefix {
            true => Ok(Network(text.into())),
            false => Err(BadConfig(format!(
                "{text:?} is neither an address nor a network such as 10.96.0.0/12"
            ))),
        }
    }
}

/// A size that Kubernetes reads in the same way.
fn size(text: &str) -> Result<String, String> {
    parse_size(text).map_err(|error| error.to_string())?;
    Ok(text.into())
}

/// A number of pods. Without any, no claim would ever be filled.
fn number(text: &str) -> Result<usize, String> {
    let number = text.parse::<NonZero<usize>>();
    let number = number.map_err(|_| format!("{text:?} is not a number of at least 1"))?;
    Ok(number.get())
}

/// Fills volumes until a signal arrives.
pub(super) fn run(arguments: Arguments) -> Result<ExitCode, Failure> {
    let certificates = arguments.ca_bundle.as_deref().map(ca_bundle).transpose()?;
    let format = arguments.log_format.unwrap_or(LogFormat::Text);
    telemetry::init(format, None).map_err(|error| BadConfig(one_line(&error.to_string())))?;
    block_on(async {
        let signal = server::signal().map_err(Failure::run)?;
        let metrics = Arc::new(Metrics::new());
        if let Some(address) = arguments.metrics_address {
            let listener = http::listen(address).await.map_err(Failure::run)?;
            // It ends with the process.
            let never = std::future::pending();
            tokio::spawn(http::serve(listener, Arc::clone(&metrics), never));
        }
        let client = connect().await.map_err(Failure::run)?;
        let populators = Populators::start(
            client,
            options(arguments, certificates),
            Arc::clone(&metrics),
        );
        let watched = Arc::clone(&populators);
        metrics.populations().observe(move || watched.problem());
        signal.await;
        populators.shut_down().await;
        Ok::<_, Failure>(ExitCode::SUCCESS)
    })
}

fn options(arguments: Arguments, certificates: Option<String>) -> PopulatorOptions {
    let namespace = arguments.namespace;
    let account = arguments
        .account
        .unwrap_or_else(|| format!("{namespace}:slackwater-populators"));
    let settings = Settings {
        private_networks: !arguments.refuse_private_networks,
        proxy: arguments.proxy.map(|proxy| proxy.0),
        certificates,
        refused: arguments.refuse.into_iter().map(|one| one.0).collect(),
        scratch_size: arguments.scratch_size,
        root_for_block: arguments.root_for_block,
        cache_class: arguments.cache_class,
        cache_snapshots: arguments.cache_snapshots,
        limits: Limits {
            all: arguments.max_pods,
            in_namespace: arguments.max_pods_per_namespace,
        },
        role: arguments.role,
        account,
        ..Settings::new(&arguments.driver_name.0, &arguments.image.0)
    };
    let me = std::env::var("POD_NAME").or_else(|_| std::env::var("HOSTNAME"));
    // The name must be unique, because it distinguishes two controllers.
    let me = me.unwrap_or_else(|_| uuid::Uuid::new_v4().to_string());
    PopulatorOptions::new(settings, &namespace, &me)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_would_reach_a_pod_are_checked() {
        let image = format!("registry.example/populate@sha256:{}", "0a".repeat(32));
        assert!(image.parse::<ImageByDigest>().is_ok());
        for wrong in ["populate:1", "populate@sha256:12", &image.to_uppercase()] {
            assert!(wrong.parse::<ImageByDigest>().is_err(), "{wrong}");
        }
        for right in ["http://proxy.example:3128", "http://[fd00::1]:1/"] {
            assert!(right.parse::<Proxy>().is_ok(), "{right}");
        }
        for wrong in [
            "https://a:1",
            "http://a",
            "http://u:p@a:1",
            "http://a:1/x",
            "a:1",
        ] {
            assert!(wrong.parse::<Proxy>().is_err(), "{wrong}");
        }
        assert_eq!(number("4"), Ok(4));
        for wrong in ["0", "-1", "4.0", ""] {
            assert!(number(wrong).is_err(), "{wrong}");
        }
        for right in ["10.96.0.1", "10.96.0.0/12", "fd00::/8", "::1"] {
            assert!(right.parse::<Network>().is_ok(), "{right}");
        }
        for wrong in ["kubernetes", "10.0.0.0/33", "fd00::/129", "10.0.0.0/", ""] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_bundle_is_reduced_to_its_certificates() {
        let key = rcgen::KeyPair::generate().expect("a key");
        let parameters = rcgen::CertificateParams::new(["ca.example".into()]).expect("parameters");
        let certificate = parameters.self_signed(&key).expect("a certificate").pem();
        let certificate = certificate.replace("\r\n", "\n");
        let key = key.serialize_pem();
        let bundle = format!("# ours\n{certificate}{key}# another\n{certificate}");
        let found = ca_bundle(&bundle).expect("a bundle");
        assert_eq!(found, format!("{certificate}{certificate}"));
        let cut = certificate.replace("-----END", "");
        let not_a_certificate = "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n";
        let large = certificate.repeat(MAX_CA_BUNDLE_BYTES / certificate.len() + 1);
        let partly = format!("{certificate}{not_a_certificate}");
        for wrong in ["", &key, &cut, not_a_certificate, &partly, &large] {
            let BadConfig(message) = ca_bundle(wrong).expect_err(wrong);
            assert!(message.contains("--ca-bundle"), "{message}");
            assert!(!message.contains("-----"), "{message}");
        }
    }
}
