"""Forms in which people give secrets to programs, for tests that nothing tells them."""

from __future__ import annotations

SECRET = S = "hunter2"

#: how people give secrets to programs, after `python train.py`
FORMS = [
    [f"DB_PASS={S}"], [f"PGPASS={S}"], ["--pass", S], ["--db_pass", S], ["--wandb_key", S],
    [f"--wandb-key={S}"], ["--key", S], ["--auth", S], ["--jwt", S], ["--bearer", S], ["--pat", S],
    ["--sas", S], ["--tokens", S], ["--secrets", S], ["--token", f"-{S}"], [f"-p{S}"], ["-p", S],
    [f"https://{S}@host/x"], [f"https://host/x?sig={S}"], [f"https://host/?X-Amz-Signature={S}"],
    [f"https://hooks.slack.com/services/T/B/{S}"], [f"--header=X-Auth: {S}"], ["-H", f"X: {S}"],
    ["--private-key-data", S], [f"postgres://u:p@{S}@h/x"], [S], [f"+wandb.key={S}"], ["-u", S],
    ["-c", f"login('{S}')"], ["--", S], [f"{S}=="], ["-m", S], ["--pin", "1234"], ["-n", S],
    [f'{{"k": "{S}"}}'], [f"--{S} x"], ["--lr", "0.1", S], [f"--url={S}.example/x.py?{S}"],
    [f"{S}@host/x=1"], [f"db@{S}=1"], [f"TOKEN:={S}"], [f"--token:{S}"], [f"-eTOKEN={S}"],
    [f"-DSECRET={S}"], [f"/p:{S}"], [f"@{S}"], [f"--c=--d={S}"], [f"--e= {S}"], [f"-1={S}"],
    [f"--x y={S}"], [f"K='{S}'"], [f"a=b={S}"], [f"line\n{S}"], [f"--x=\n{S}"], [f"s3://AK:{S}@b/x.py"],
    ["-genv", "T", S], ["bash", "-c", f"x {S}"], [f"~/{S}"], [f"x/{S}.json"], [f"{S}.py?x"],
]  # fmt: skip
