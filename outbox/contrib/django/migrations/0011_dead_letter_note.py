from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [("outbox", "0010_past_condition")]

    operations = [
        migrations.CreateModel(
            name="DeadLetterNote",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("group", models.CharField(db_column="consumer_group", max_length=127)),
                ("message_id", models.UUIDField()),
                ("attempts", models.IntegerField(default=0)),
                ("error", models.TextField(default="")),
                ("noted_at", models.DateTimeField()),
                ("settled_until", models.BigIntegerField(default=0)),
                ("settled_at", models.DateTimeField(null=True)),
                ("is_discarded", models.BooleanField(default=False)),
            ],
            options={
                "verbose_name": "note about a dead letter of RocketMQ",
                "verbose_name_plural": "notes about dead letters of RocketMQ",
                "db_table": "outbox_dead_letter_note",
                "constraints": [
                    models.UniqueConstraint(fields=("group", "message_id"), name="outbox_one_dead_letter_note")
                ],
            },
        ),
    ]
