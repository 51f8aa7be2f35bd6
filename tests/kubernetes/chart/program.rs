//! The program accepts the arguments that the chart uses, and exports the metrics that the chart's
//! alerts use.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::{Args, Command, FromArgMatches};
use slackwater::config::{Agents, Config, Given, RoleConfig};

use super::{CASES, chart, helm, rendered};

/// The arguments of a container, with the values that Kubernetes inserts.
fn arguments(text: &str, container: &str) -> Option<Vec<String>> {
    let (_, rest) = text.split_once(&format!("\n        - name: {container}\n"))?;
    let (_, rest) = rest.split_once("\n          args:\n")?;
    let lines = rest
        .lines()
        .map_while(|line| line.strip_prefix("            - "));
    let put_in = |line: &str| {
        line.replace("$(NODE_NAME)", "node-1")
            .replace("$(NAMESPACE)", "slackwater")
    };
    Some(lines.map(put_in).collect())
}

fn parse(words: &[String]) -> Config {
    assert_eq!(words[0], "serve");
    let command = Given::augment_args(Command::new("serve"));
    let matches = command.try_get_matches_from(words);
    let matches = matches.unwrap_or_else(|error| panic!("{words:?}: {error}"));
    let given = Given::from_arg_matches(&matches).expect("its own matches");
    given
        .finish()
        .unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

#[test]
fn the_program_accepts_the_rendered_arguments() {
    for (name, words) in CASES {
        let Some(output) = rendered(words) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let node = parse(&arguments(&text, "driver").expect("the driver"));
        let router = arguments(&text, "router").map(|words| parse(&words));
        let import_paths = node.node().map(|node| node.import_paths.clone());
        let expected: &[&str] = match name {
            "everything" => &["/opt/local-path-provisioner", "/var/csi/rawfile"],
            _ => &[],
        };
        let expected = expected.iter().map(|path| path.into()).collect();
        assert_eq!(import_paths, Some(expected), "{name}");
        match (&node.role, router) {
            (RoleConfig::All { .. }, None) => assert_eq!(name, "single_node"),
            (RoleConfig::Node { agent, .. }, Some(router)) => {
                assert_eq!(agent.name.to_string(), "node.node-1.slackwater");
                assert_eq!(node.driver_name, router.driver_name);
                assert_eq!(
                    node.alpha, router.alpha,
                    "the router and the agents have the same alpha features"
                );
                let RoleConfig::Controller(controller) = router.role else {
                    panic!("{name}: the router is {:?}", router.role);
                };
                assert!(matches!(controller.agents, Agents::Of(_)), "{name}");
                let makes_its_own = controller.tls.is_none();
                assert_eq!(makes_its_own, arguments(&text, "enrol").is_some(), "{name}");
            }
            (role, router) => panic!("{name}: {role:?} with {router:?}"),
        }
    }
}

/// In a release with any name, the router receives the actual names of its objects.
#[test]
fn the_router_receives_the_names_of_its_objects() {
    for release in ["slackwater", "disks", "my-slackwater"] {
        let chart = chart().to_string_lossy().into_owned();
        let Some(output) = helm(&["template", release, &chart, "--namespace=storage"]) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let objects: Vec<_> = text.split("\n---\n").collect();
        let one = |kind: &str, with: &str| {
            let is_it = |object: &&&str| {
                object.contains(&format!("kind: {kind}\n")) && object.contains(with)
            };
            let mut found = objects.iter().filter(is_it);
            let first = found
                .next()
                .unwrap_or_else(|| panic!("{release}: a {kind} with {with}"));
            assert!(found.next().is_none(), "{release}: one {kind} with {with}");
            *first
        };
        let after = |object: &str, key: &str| {
            let (_, rest) = object
                .split_once(key)
                .unwrap_or_else(|| panic!("{key}: {object}"));
            let end = rest.find(['\n', '}', '"']).expect("an end");
            rest[..end].to_string()
        };
        let name = |object: &str| after(object, "\n  name: ");
        let (router, node) = (one("Deployment", ""), one("DaemonSet", ""));
        let account = |object: &str| after(object, "serviceAccountName: ");
        let argument_of = |variable: &str| after(router, &format!("{variable}, value: "));
        assert_eq!(
            argument_of("HOOKS_ROLE"),
            name(one("ClusterRole", "pods/exec"))
        );
        let whom = after(router, "HOOKS_ACCOUNT, value: \"");
        assert_eq!(whom, format!("storage:{}", account(router)));
        assert_eq!(argument_of("NODE_ACCOUNT"), account(node));
        let service = after(router, "--agent-service=$(NAMESPACE)/");
        assert_eq!(service, name(one("Service", "targetPort: agent}")));
    }
}

/// Metrics with their labels, according to the manual. `every_metric_is_in_the_manual` proves that
/// they are those of the program.
fn metrics() -> BTreeMap<String, BTreeSet<String>> {
    let manual = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/metrics.md");
    let manual = std::fs::read_to_string(manual).expect("the manual");
    let rows = manual.lines().filter_map(|line| line.strip_prefix("| `"));
    let names = rows.filter_map(|row| row.split('`').next());
    names
        .map(|name| {
            let (name, labels) = name.split_once('{').unwrap_or((name, ""));
            let labels = labels.trim_end_matches('}').split(',');
            (name.to_string(), labels.map(str::to_string).collect())
        })
        .collect()
}

/// The words of a text with this prefix.
fn words<'a>(text: &'a str, start: &str) -> Vec<&'a str> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let places = text.match_indices(start).map(|(at, _)| &text[at..]);
    places
        .map(|rest| {
            let from = if word(start.chars().next_back().unwrap_or(' ')) {
                0
            } else {
                start.len()
            };
            let rest = &rest[from..];
            &rest[..rest.find(|c| !word(c)).unwrap_or(rest.len())]
        })
        .collect()
}

#[test]
fn alerts_use_metrics_that_the_program_exports() {
    let rules = [
        "--set=metrics.prometheusRule.create=true",
        "--show-only=templates/monitoring.yaml",
    ];
    let Some(output) = rendered(&rules) else {
        return;
    };
    let text = String::from_utf8(output.stdout).expect("text");
    let metrics = metrics();
    let mut seen = BTreeSet::new();
    for rule in text.split("- alert: ").skip(1) {
        let name = rule.lines().next().expect("a name");
        let (_, rest) = rule.split_once("expr: ").expect("an expression");
        let (expression, rest) = rest.split_once('\n').expect("more lines");
        let asked = words(expression, "slackwater_");
        assert!(!asked.is_empty(), "{name}");
        let of_metric = asked.iter().flat_map(|metric| {
            let labels = metrics.get(*metric);
            labels.unwrap_or_else(|| panic!("{name}: the program has no metric {metric}"))
        });
        // Labels that the ServiceMonitor and Prometheus add. An aggregation keeps the ones that it
        // names.
        let added = ["namespace", "pod", "node"].map(str::to_string);
        let mut labels: BTreeSet<_> = of_metric.cloned().chain(added).collect();
        if let Some((_, by)) = expression.split_once(" by (") {
            let by = by.split(')').next().expect("an end").split(", ");
            labels = by.map(str::to_string).collect();
        } else if expression.contains("sum(") || expression.contains("max(") {
            labels.clear();
        }
        for label in words(rest, "$labels.") {
            assert!(
                labels.contains(label),
                "{name} has no label {label}: {expression}"
            );
        }
        assert!(rest.contains("severity: "), "{name}");
        seen.insert(name.to_string());
    }
    for wanted in ["FrozenTooLong", "PoolFilling", "Orphans", "AgentLost"] {
        assert!(seen.contains(&format!("Slackwater{wanted}")), "{seen:?}");
    }
}

/// A certificate in PEM.
fn authority() -> String {
    let key = rcgen::KeyPair::generate().expect("a key");
    let parameters = rcgen::CertificateParams::new(["ca.example".into()]).expect("parameters");
    parameters.self_signed(&key).expect("a certificate").pem()
}

/// The command line of the controller of data sources, and the image that the policy allows.
#[test]
fn the_program_accepts_the_arguments_of_the_controller_of_data_sources() {
    for (name, words) in CASES {
        let Some(output) = rendered(words) else {
            return;
        };
        let text = String::from_utf8(output.stdout).expect("text");
        let Some(words) = arguments(&text, "populators") else {
            assert_ne!(name, "populators");
            continue;
        };
        assert_eq!(name, "populators");
        let words: Vec<_> = words
            .iter()
            .map(|word| word.replace("$(CA_BUNDLE)", &authority()))
            .collect();
        // An invalid value is refused before the first connection to a cluster.
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_slackwater"))
            .args(&words)
            .env_remove("KUBERNETES_SERVICE_HOST")
            .env("KUBECONFIG", "/nonexistent")
            .env("HOME", "/nonexistent")
            .output()
            .expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words:?}: {error}");
        assert!(error.contains("the Kubernetes API"), "{words:?}: {error}");
        let image = words.iter().find_map(|word| word.strip_prefix("--image="));
        let image = image.expect("an image");
        let allowed = format!("variables.one.image == \"{image}\"");
        assert!(text.contains(&allowed), "{allowed}");
    }
}
