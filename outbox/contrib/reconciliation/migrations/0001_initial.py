from django.db import migrations, models

from outbox.contrib.django.database.columns import compare_as_postgresql


class Migration(migrations.Migration):

    initial = True

    dependencies = [
    ]

    operations = [
        migrations.CreateModel(
            name='Finding',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('output', models.TextField()),
                ('run', models.CharField(max_length=63)),
                ('rule', models.CharField(max_length=255)),
                ('group', models.CharField(blank=True, db_column='consumer_group', max_length=127)),
                ('finding_class', models.CharField(db_column='class', max_length=15, verbose_name='class')),
                ('severity', models.CharField(max_length=15)),
                ('key', models.TextField()),
                ('detail', models.TextField(blank=True)),
                ('at', models.DateTimeField(null=True)),
                ('first_seen', models.DateTimeField(null=True)),
                ('message_id', models.CharField(blank=True, max_length=63)),
                ('transaction_id', models.CharField(blank=True, max_length=63)),
                ('row', models.TextField(blank=True)),
                ('body', models.TextField(blank=True)),
                ('step', models.JSONField(null=True)),
            ],
            options={
                'verbose_name': 'reconciliation finding',
                'db_table': 'outbox_finding',
            },
        ),
        migrations.CreateModel(
            name='SavedReconciliation',
            fields=[
                ('id', models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name='ID')),
                ('output', models.TextField(unique=True)),
                ('run', models.CharField(max_length=63)),
                ('judged_at', models.DateTimeField()),
                ('causes', models.JSONField()),
                ('plan', models.JSONField()),
            ],
            options={
                'db_table': 'outbox_reconciliation',
            },
        ),
        # MariaDB ends a transaction at each of these statements, and Django refuses them in one.
        migrations.RunPython(compare_as_postgresql('outbox_reconciliation'), migrations.RunPython.noop, atomic=False),
    ]
