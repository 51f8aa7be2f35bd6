//! The chart's alerts: each fires when it should and only then, says what happened, and leads to a
//! runbook that exists. promtool comes from the package of Prometheus (`tests/packages/get`).

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use slackwater_testkit::{Scratch, packages};

use super::rendered;

/// A rule as the chart renders it.
#[derive(Debug)]
struct Rule {
    alert: String,
    expression: String,
    duration: String,
    severity: String,
    summary: String,
    description: String,
    runbook: String,
}

/// The object that the chart renders with all alerts.
pub(super) fn object(words: &[&str]) -> Option<String> {
    let rules = [
        "--set=metrics.prometheusRule.create=true,schedules.create=true",
        "--show-only=templates/monitoring.yaml",
    ];
    let output = rendered(&[&rules[..], words].concat())?;
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    Some(String::from_utf8(output.stdout).expect("text"))
}

/// The value of a key, which is on its line or, after `>-`, on the next one.
fn value(rule: &str, key: &str) -> Option<String> {
    let mut lines = rule.lines().map(str::trim);
    let start = format!("{key}: ");
    let first = lines.find_map(|line| line.strip_prefix(&start))?;
    let found = if first == ">-" { lines.next()? } else { first };
    Some(found.to_string())
}

fn rules(object: &str) -> Vec<Rule> {
    let each = object.split("- alert: ").skip(1);
    let rules = each.map(|text| {
        let alert = text.lines().next().expect("a name").to_string();
        let get = |key: &str| {
            let value = value(text, key).filter(|value| !value.is_empty());
            value.unwrap_or_else(|| panic!("{alert} has no {key}"))
        };
        Rule {
            expression: get("expr"),
            duration: value(text, "for").unwrap_or_default(),
            severity: get("labels").replace("{severity: ", "").replace('}', ""),
            summary: get("summary"),
            description: get("description"),
            runbook: get("runbook_url"),
            alert,
        }
    });
    let rules: Vec<_> = rules.collect();
    assert!(rules.len() > 15, "the rules are found: {rules:?}");
    rules
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs")
}

fn page(name: &str) -> String {
    let path = docs().join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Whether a page has a heading with this anchor, as GitHub generates it.
fn has_heading(page: &str, anchor: &str) -> bool {
    let titles = page.lines().filter(|line| line.starts_with('#'));
    let anchors = titles.map(|line| {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title
            .chars()
            .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c })
            .collect::<String>()
    });
    anchors.into_iter().any(|one| one == anchor)
}

#[test]
fn each_alert_leads_to_a_runbook_that_exists() {
    let Some(plain) = object(&[]) else { return };
    let base = "https://docs.example.org/slackwater";
    let set = format!("--set=metrics.prometheusRule.runbookBase={base}/");
    let published = object(&[&set]).expect("helm is available");
    let table = page("troubleshooting.md");
    for (rule, published) in rules(&plain).iter().zip(rules(&published)) {
        let alert = &rule.alert;
        let path = rule.runbook.strip_prefix("docs/");
        let path = path.unwrap_or_else(|| panic!("{alert}: {}", rule.runbook));
        assert_eq!(published.runbook, format!("{base}/{path}"));
        let (file, anchor) = path.split_once('#').expect("an anchor");
        assert!(
            has_heading(&page(file), anchor),
            "{alert}: no heading {path}"
        );
        let link = path.strip_prefix("troubleshooting.md").unwrap_or(path);
        let row = table
            .lines()
            .find(|line| line.starts_with(&format!("| {alert} | [")));
        let row = row.unwrap_or_else(|| panic!("docs/troubleshooting.md has no row of {alert}"));
        assert!(row.contains(&format!("]({link})")), "{alert}: {row}");
        assert!(!rule.summary.ends_with('.'), "{alert}: {}", rule.summary);
        assert!(
            rule.description.ends_with('.'),
            "{alert}: {}",
            rule.description
        );
        assert!(rule.description.len() > rule.summary.len(), "{alert}");
    }
    let rows = table
        .lines()
        .filter(|line| line.starts_with("| Slackwater"));
    assert_eq!(rows.count(), rules(&plain).len(), "the alerts of the table");
}

#[test]
fn the_manual_lists_the_alerts() {
    const BEGIN: &str = "<!-- alerts: UPDATE_DOCS=1 writes this table from the chart -->\n";
    const END: &str = "<!-- end -->";
    let Some(object) = object(&[]) else { return };
    let mut table = String::from("| alert | severity | expression | for |\n|---|---|---|---|\n");
    for rule in rules(&object) {
        let expression = rule.expression.replace('|', "\\|");
        table += &format!(
            "| {} | {} | `{expression}` | {} |\n",
            rule.alert, rule.severity, rule.duration
        );
    }
    let written = page("metrics.md");
    let (before, rest) = written.split_once(BEGIN).expect("the begin of the table");
    let (now, after) = rest.split_once(END).expect("its end");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        let page = format!("{before}{BEGIN}{table}{END}{after}");
        fs::write(docs().join("metrics.md"), page).expect("the page is written");
    } else {
        assert_eq!(now, table, "docs/metrics.md is old: run with UPDATE_DOCS=1");
    }
}

/// The rules as a file of Prometheus.
pub(super) fn file_of_rules(object: &str) -> String {
    let (_, spec) = object.split_once("\nspec:\n").expect("a specification");
    let lines = spec
        .lines()
        .map(|line| line.strip_prefix("  ").unwrap_or(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// An alert, whether it fires, after this number of minutes, with these series: values of one minute each.
type Case = (
    &'static str,
    bool,
    u32,
    &'static [(&'static str, &'static str)],
);

const TOTAL: (&str, &str) = ("slackwater_pool_total_bytes{pool='a'}", "1000+0x500");
const AVAILABLE: &str = "slackwater_pool_available_bytes{pool='a'}";
const PROMISED: (&str, &str) = ("slackwater_pool_promised_bytes{pool='a'}", "1001+0x500");
const METADATA: (&str, &str) = ("slackwater_pool_metadata_total_bytes{pool='a'}", "100+0x20");
const FREE_METADATA: &str = "slackwater_pool_metadata_available_bytes{pool='a'}";
const DEGRADED: &str = "slackwater_pools{namespace='s',pod='a',health='Degraded'}";
const DEGRADED_B: &str = "slackwater_pools{namespace='s',pod='b',health='Degraded'}";
const MISSED_A: &str = "slackwater_schedule_missed_slots{pod='a',schedule='shop/pg'}";
const MISSED_B: &str = "slackwater_schedule_missed_slots{pod='b',schedule='shop/pg'}";
const FAILING_A: &str = "slackwater_schedule_failing{schedule='shop/pg',condition='Cut',pod='a'}";
const FAILING_B: &str = "slackwater_schedule_failing{schedule='shop/pg',condition='Cut',pod='b'}";
const OVERDUE_A: &str = "slackwater_schedule_overdue_seconds{schedule='shop/pg',pod='a'}";
const OVERDUE_B: &str = "slackwater_schedule_overdue_seconds{schedule='shop/pg',pod='b'}";
const DEFECTS: &str = "slackwater_calls_total{method='CreateVolume',code='INTERNAL'}";
const FAILED_CUTS: &str = "slackwater_cut_failures_total{reason='lost'}";

#[rustfmt::skip]
const CASES: &[Case] = &[
    ("FrozenTooLong", true, 5, &[("slackwater_frozen", "0 1+0x9")]),
    ("FrozenTooLong", false, 7, &[("slackwater_frozen", "1 0 1 0 1 0 1 0")]),
    ("PoolFilling", true, 6, &[TOTAL, (AVAILABLE, "49+0x10")]),
    ("PoolFilling", false, 4, &[TOTAL, (AVAILABLE, "49+0x10")]),
    ("PoolFilling", false, 10, &[TOTAL, (AVAILABLE, "50+0x10")]),
    ("PoolWillBeFull", true, 395, &[TOTAL, (AVAILABLE, "1000-2x400")]),
    // Soon, but much is free.
    ("PoolWillBeFull", false, 290, &[TOTAL, (AVAILABLE, "1000-2x400")]),
    ("PoolWillBeFull", false, 400, &[TOTAL, (AVAILABLE, "300+0x400")]),
    // It fills up, and not within a day.
    ("PoolWillBeFull", false, 400, &[TOTAL, (AVAILABLE, "370-0.1x400")]),
    // A burst of writes, at the times at which the last hour has it, and afterwards.
    ("PoolWillBeFull", false, 358, &[TOTAL, (AVAILABLE, "900+0x300 300+0x100")]),
    ("PoolWillBeFull", false, 362, &[TOTAL, (AVAILABLE, "900+0x300 300+0x100")]),
    ("PoolWillBeFull", false, 395, &[TOTAL, (AVAILABLE, "900+0x300 300+0x100")]),
    // Little is free and almost nothing is written.
    ("PoolWillBeFull", false, 400, &[TOTAL, (AVAILABLE, "30-0.022x400")]),
    ("PoolOvercommitted", true, 16, &[TOTAL, PROMISED, (AVAILABLE, "199+0x20")]),
    ("PoolOvercommitted", false, 20, &[TOTAL, PROMISED, (AVAILABLE, "200+0x20")]),
    ("PoolOvercommitted", false, 20, &[TOTAL, ("slackwater_pool_promised_bytes{pool='a'}", "1000+0x20"), (AVAILABLE, "100+0x20")]),
    ("PoolMetadataFilling", true, 6, &[METADATA, (FREE_METADATA, "9+0x10")]),
    ("PoolMetadataFilling", false, 10, &[METADATA, (FREE_METADATA, "10+0x10")]),
    ("PoolNotServed", true, 6, &[("slackwater_pool_served", "0+0x10")]),
    ("PoolNotServed", false, 10, &[("slackwater_pool_served", "0+0x3 1 0+0x4 1")]),
    ("PoolHangs", true, 6, &[("slackwater_status_age_seconds", "0+60x10")]),
    ("PoolHangs", false, 5, &[("slackwater_status_age_seconds", "0+60x10")]),
    ("DeviceChanged", true, 1, &[("slackwater_pool_changed_devices", "0 1")]),
    ("DeviceChanged", false, 1, &[("slackwater_pool_changed_devices", "1 0")]),
    ("DamagedRecords", true, 1, &[("slackwater_pool_damaged_records", "0 1")]),
    ("DamagedRecords", false, 1, &[("slackwater_pool_damaged_records", "1 0")]),
    ("PoolDegraded", true, 16, &[(DEGRADED, "1+0x20")]),
    ("PoolDegraded", false, 14, &[(DEGRADED, "1+0x20")]),
    ("PoolDegraded", false, 20, &[(DEGRADED, "0+0x20"), ("slackwater_pools{health='Lost'}", "1+0x20")]),
    ("PoolDegraded", true, 16, &[("slackwater_pools{health='Unreachable'}", "1+0x20")]),
    // Another router becomes the leader: nothing counts pools for two minutes.
    ("PoolDegraded", true, 16, &[(DEGRADED, "1+0x9 stale"), (DEGRADED_B, "_x12 1+0x20")]),
    ("PoolDegraded", false, 14, &[(DEGRADED, "1+0x9 stale"), (DEGRADED_B, "_x12 1+0x20")]),
    // The pool is well again after that, or at once.
    ("PoolDegraded", false, 16, &[(DEGRADED, "1+0x9 stale"), ("slackwater_pools{namespace='s',pod='b',health='Healthy'}", "_x12 1+0x20")]),
    ("PoolDegraded", false, 16, &[(DEGRADED, "1+0x13 stale"), ("slackwater_pools{namespace='s',pod='a',health='Healthy'}", "1+0x20")]),
    ("Orphans", true, 61, &[("slackwater_orphans{kind='volume',pod='a'}", "1+0x70")]),
    ("Orphans", false, 61, &[("slackwater_orphans{kind='volume',pod='a'}", "1+0x50 0 1+0x20")]),
    // Another router becomes the leader, and has checked after 20 minutes: there are still some, or none.
    ("Orphans", true, 61, &[("slackwater_orphans{kind='volume',pod='a'}", "1+0x30 stale"), ("slackwater_orphans{kind='volume',pod='b'}", "_x50 1+0x30")]),
    ("Orphans", false, 61, &[("slackwater_orphans{kind='volume',pod='a'}", "1+0x30 stale"), ("slackwater_orphans{kind='volume',pod='b'}", "_x50 0+0x30")]),
    ("Orphans", false, 70, &[("slackwater_orphans{kind='volume',pod='a'}", "1+0x30 stale")]),
    ("AgentLost", true, 6, &[("slackwater_agent_up{agent='n',pod='a'}", "0+0x10"), ("slackwater_agent_up{agent='n',pod='b'}", "0+0x10")]),
    ("AgentLost", false, 10, &[("slackwater_agent_up{agent='n',pod='a'}", "0+0x10"), ("slackwater_agent_up{agent='n',pod='b'}", "1+0x10")]),
    ("NobodyLeads", true, 6, &[("slackwater_router_leads{pod='a'}", "0+0x10"), ("slackwater_router_leads{pod='b'}", "0+0x10")]),
    ("NobodyLeads", true, 6, &[]),
    ("NobodyLeads", false, 10, &[("slackwater_router_leads{pod='a'}", "0+0x10"), ("slackwater_router_leads{pod='b'}", "1+0x10")]),
    ("ClusterReadsFail", true, 16, &[("slackwater_cluster_watches_failing{pod='a'}", "1+0x20")]),
    ("ClusterReadsFail", false, 16, &[("slackwater_cluster_watches_failing{pod='a'}", "1+0x9 0 1+0x10")]),
    ("NodeLabelConflict", true, 6, &[("slackwater_node_label_conflicts", "1+0x10")]),
    ("NodeLabelConflict", false, 10, &[("slackwater_node_label_conflicts", "0+0x10")]),
    ("CertificateExpires", true, 61, &[("slackwater_certificate_expiry_seconds", "604800+0x70")]),
    ("CertificateExpires", false, 70, &[("slackwater_certificate_expiry_seconds", "700000+0x70")]),
    ("ScheduleOverdue", true, 1, &[("slackwater_schedule_overdue_seconds{schedule='shop/pg'}", "0 1801")]),
    ("ScheduleOverdue", false, 1, &[("slackwater_schedule_overdue_seconds{schedule='shop/pg'}", "0 1800")]),
    ("ScheduleSlotsMissed", true, 70, &[(MISSED_A, "2+0x60 3+0x60")]),
    // Slots are missed because nothing runs, so there is nothing to compare with an hour before.
    ("ScheduleSlotsMissed", true, 135, &[(MISSED_A, "2+0x60 _x70 3+0x80")]),
    ("ScheduleSlotsMissed", false, 130, &[(MISSED_A, "2+0x60 3+0x80")]),
    // Another router becomes the leader.
    ("ScheduleSlotsMissed", false, 90, &[(MISSED_A, "3+0x65"), (MISSED_B, "_x66 3+0x60")]),
    ("ScheduleFails", true, 61, &[("slackwater_schedule_failing{schedule='shop/pg',condition='Cut'}", "1+0x70")]),
    ("ScheduleFails", false, 61, &[("slackwater_schedule_failing{schedule='shop/pg',condition='Cut'}", "1+0x50")]),
    // Another router becomes the leader: nothing reports schedules for two minutes.
    ("ScheduleFails", true, 61, &[(FAILING_A, "1+0x30 stale"), (OVERDUE_A, "0+0x30 stale"), (FAILING_B, "_x33 1+0x40"), (OVERDUE_B, "_x33 0+0x40")]),
    ("ScheduleFails", false, 61, &[(FAILING_A, "1+0x30 stale"), (OVERDUE_A, "0+0x30 stale"), (OVERDUE_B, "_x33 0+0x40")]),
    // The condition is well again.
    ("ScheduleFails", false, 61, &[(FAILING_A, "1+0x58 stale"), (OVERDUE_A, "0+0x70")]),
    ("CutsFail", true, 60, &[(FAILED_CUTS, "0+0x30 4+0x40")]),
    ("CutsFail", false, 60, &[(FAILED_CUTS, "0+0x30 2+0x40")]),
    ("Defects", true, 60, &[(DEFECTS, "0+0x30 1+0x40")]),
    // The series appears with the first error.
    ("Defects", true, 60, &[(DEFECTS, "_x30 1+0x40")]),
    // Prometheus did not scrape for more than an hour, and an error of before is the last one, or is not.
    ("Defects", false, 135, &[(DEFECTS, "1+0x30 _x70 1+0x40")]),
    ("Defects", true, 135, &[(DEFECTS, "1+0x30 _x70 2+0x40")]),
    // The driver was started again in between.
    ("Defects", true, 135, &[(DEFECTS, "5+0x30 _x70 1+0x40")]),
    ("Defects", false, 60, &[(DEFECTS, "1+0x70"), ("slackwater_calls_total{method='CreateVolume',code='OK'}", "0+1x70")]),
];

/// The cases as a file of `promtool test rules`.
fn file_of_cases() -> String {
    let mut text = String::from("rule_files: [rules.yaml]\nevaluation_interval: 1m\ntests:\n");
    for (alert, fires, minutes, series) in CASES {
        text += &format!(
            "  - name: {alert} {fires} after {minutes} min\n    interval: 1m\n    input_series:"
        );
        text += if series.is_empty() { " []\n" } else { "\n" };
        for (series, values) in *series {
            text += &format!("      - {{series: \"{series}\", values: \"{values}\"}}\n");
        }
        let firing = format!("ALERTS{{alertname='Slackwater{alert}',alertstate='firing'}}");
        text += &format!(
            "    promql_expr_test:\n      - expr: \"(count({firing}) or vector(0)) > bool 0\"\n        eval_time: {minutes}m\n        exp_samples: [{{labels: '{{}}', value: {}}}]\n",
            u8::from(*fires)
        );
    }
    text
}

#[test]
fn each_alert_fires_when_it_should_and_only_then() {
    let Some(object) = object(&[]) else { return };
    let names = |fires: bool| -> BTreeSet<String> {
        let cases = CASES.iter().filter(|(_, its, ..)| *its == fires);
        cases
            .map(|(alert, ..)| format!("Slackwater{alert}"))
            .collect()
    };
    let all: BTreeSet<_> = rules(&object).into_iter().map(|rule| rule.alert).collect();
    assert_eq!(names(true), all, "alerts with a case in which they fire");
    assert_eq!(
        names(false),
        all,
        "alerts with a case in which they do not fire"
    );
    let Some(promtool) = packages::find("promtool", "tests of the chart's alerts") else {
        return;
    };
    let scratch = Scratch::new();
    fs::write(scratch.join("rules.yaml"), file_of_rules(&object)).expect("a file");
    fs::write(scratch.join("cases.yaml"), file_of_cases()).expect("a file");
    for words in [
        ["check", "rules", "rules.yaml"],
        ["test", "rules", "cases.yaml"],
    ] {
        let output = Command::new(&promtool)
            .args(words)
            .current_dir(scratch.join("."))
            .output()
            .expect("promtool starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words:?}: {text}{error}");
        let found = format!("{} rules found", all.len());
        assert!(words[0] == "test" || text.contains(&found), "{text}");
    }
}
